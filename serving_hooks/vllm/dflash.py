"""DFlash drafters derive tensors from their weights: a swap must find those weights and keep those tensors in place.

On CPU vLLM packs a linear layer's weight and empties it, so nothing could be derived from it a second time: a drafter's
layers keep theirs. And each load makes the derived tensors anew, while a captured graph goes on reading the old ones:
the new values are copied into them.
"""

from __future__ import annotations

import functools
from typing import Any

from draftloop.serving_hooks.vllm import proof, versions

_MARK = "_draftloop"


def install() -> None:
    """Any number of calls."""
    drafter, inner, linear = versions.dflash()
    if hasattr(drafter.__init__, _MARK):
        return
    build_model = drafter.__init__
    build_buffers = inner._build_fused_kv_buffers

    @functools.wraps(build_model)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build_model(self, *args, **kwargs)
        for module in self.modules():
            if isinstance(module, linear):
                module._cpu_skip_gemm_dispatch = True

    @functools.wraps(build_buffers)
    def build(self: Any) -> None:
        owner = _Holder(self)
        held = dict(proof.fused_buffers(owner))
        build_buffers(self)
        for name, new in dict(proof.fused_buffers(owner)).items():
            old = held.get(name)
            if old is not None and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device):
                old.copy_(new)
                setattr(self, name, old)

    setattr(init, _MARK, True)
    drafter.__init__ = init
    inner._build_fused_kv_buffers = build


class _Holder:
    def __init__(self, model: Any) -> None:
        self.model = model

"""Where the parts of the plug-in meet inside one API server process.

vLLM builds each part by itself (general plug-in, stat logger, endpoint plug-in, middleware) and hands none of them to
the others, so one object a process is what they share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from draftloop.pipeline.errors import ConfigError, DraftloopError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.records import SpecCounters
from draftloop.serving_hooks.capture import CaptureHook
from draftloop.serving_hooks.vllm.settings import ServingSettings, load_settings
from draftloop.serving_hooks.vllm.timing import Timing


@dataclass(frozen=True)
class Served:
    """The drafter the engine drafts with. All None: not known (no manifest at boot, or woken without its drafter)."""

    version: str | None = None
    digest: str | None = None  # of its folder
    tensors: str | None = None  # of the loaded tensors, as the manifest names them
    since_ms: int = 0  # Unix time


@dataclass
class Discount:
    """What vLLM's statistics have counted too much since their last step was added to the counters."""

    num_steps: int = 0
    num_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass
class Runtime:
    """Mutable on the event loop's thread only, but for `counters` and `served`, which are replaced whole."""

    settings: ServingSettings | None = None
    fingerprint: Fingerprint | None = None
    hook: CaptureHook | None = None
    capturing: bool = False
    started: bool = False  # hook and metrics are there
    takes_logprobs: bool = True  # where a client asked for them
    served: Served = field(default_factory=Served)
    counters: SpecCounters = field(default_factory=SpecCounters)  # probes left out
    processors: list[Any] = field(default_factory=list)  # vLLM's OutputProcessor, with the states of what runs
    discount: Discount = field(default_factory=Discount)
    timing: Timing = field(default_factory=Timing)
    swaps: dict[str, int] = field(default_factory=dict)  # result -> count
    epoch: int = 0  # grows whenever another drafter may have drafted
    restart_needed: str | None = None  # why this process must be replaced
    trouble: DraftloopError | None = None  # why the plug-in does nothing; serving goes on without it
    boot_id: str = field(default_factory=lambda: f"{time.time_ns():x}")

    def serve(self, version: str | None, digest: str | None, tensors: str | None) -> None:
        """From now on this drafter is what the engine drafts with."""
        self.served = Served(version, digest, tensors, time.time_ns() // 1_000_000)
        self.epoch += 1

    def count_swap(self, result: str) -> None:
        """One more swap with this result."""
        self.swaps = {**self.swaps, result: self.swaps.get(result, 0) + 1}
        self.epoch += 1

    def fault(self) -> None:
        """Count what went wrong with us, which no request is to suffer from."""
        if self.hook is not None:
            self.hook.refuse("unexpected")


@cache
def current() -> Runtime:
    """The one of this process. What is wrong with the settings is kept in `trouble`: serving must not depend on it."""
    try:
        settings = load_settings()
        if settings is None:
            return Runtime(trouble=ConfigError("DRAFTLOOP_SERVING is not set", mend="docs/vllm.md shows the form"))
        return Runtime(settings=settings, fingerprint=settings.fingerprint(), capturing=settings.capture.enabled)
    except DraftloopError as error:
        return Runtime(trouble=error)

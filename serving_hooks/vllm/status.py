"""What GET /status answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from draftloop.pipeline.errors import EngineUnsupportedError
from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.runtime import Runtime
from draftloop.serving_hooks.vllm.swap import Swapper


def status(runtime: Runtime, swapper: Swapper | None) -> dict[str, Any]:
    """Plain values; no content of any request."""
    trouble = runtime.trouble or (swapper.refusal if swapper else None)
    fingerprint = runtime.fingerprint
    return {
        "engine": "vllm",
        "release": versions.release(),
        "supported": not isinstance(trouble, EngineUnsupportedError),
        "trouble": None
        if trouble is None
        else {"class": type(trouble).__name__, "message": trouble.message, "mend": trouble.mend},
        "boot_id": runtime.boot_id,
        "fingerprint": fingerprint.to_dict() if fingerprint else None,
        "fingerprint_digest": fingerprint.digest if fingerprint else None,
        "drafter": asdict(runtime.served),
        "swapping": swapper.swapping if swapper else False,
        "restart_needed": runtime.restart_needed,
        "counters": msgspec.to_builtins(runtime.counters),
        "swaps": runtime.swaps,
        "capture": _capture(runtime),
    }


def _capture(runtime: Runtime) -> dict[str, Any]:
    hook = runtime.hook
    return {
        "capturing": runtime.capturing and hook is not None,
        "counters": None if hook is None else hook.counters(),
        "last_error": None if hook is None else hook.last_error,
        "serving_us": runtime.timing.summary(),
    }

"""A woken engine drafts with the drafter that served: level 2 sleep throws all weights away, waking brings back none.

The target's are the operator's to load again, as vLLM documents; the drafter's come from the copy each worker holds.
They are in before the scheduler runs: vLLM resumes it only when everything is awake, so the cache is woken last.
"""

from __future__ import annotations

import functools
from typing import Any

from draftloop.serving_hooks.vllm import versions

_MARK = "_draftloop"
SWAPPER = "_draftloop_swapper"  # on the engine; there is none before the admin plug-in has met it
_SLEPT = "_draftloop_slept"  # level


def install() -> None:
    """Any number of calls."""
    engine = versions.async_llm()
    if hasattr(engine.wake_up, _MARK):
        return
    sleep_as_before, wake_as_before = engine.sleep, engine.wake_up

    @functools.wraps(sleep_as_before)
    async def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> None:
        swapper = getattr(self, SWAPPER, None)
        if swapper is None:
            await sleep_as_before(self, level, *args, **kwargs)
            return
        async with swapper.lock:
            await sleep_as_before(self, level, *args, **kwargs)
            setattr(self, _SLEPT, max(level, getattr(self, _SLEPT, 0)))

    @functools.wraps(wake_as_before)
    async def wake_up(self: Any, tags: list[str] | None = None) -> bool:
        swapper = getattr(self, SWAPPER, None)
        if swapper is None or getattr(self, _SLEPT, 0) < 2 or not (tags is None or "weights" in tags):
            return bool(await wake_as_before(self, tags))
        async with swapper.lock:
            awake = await wake_as_before(self, ["weights"])
            await swapper.reload()
            setattr(self, _SLEPT, 0)
            rest = ["kv_cache"] if tags is None else [tag for tag in tags if tag != "weights"]
            return bool(await wake_as_before(self, rest)) if rest else bool(awake)

    setattr(wake_up, _MARK, True)
    engine.sleep, engine.wake_up = sleep, wake_up

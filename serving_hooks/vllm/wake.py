"""A woken engine drafts with the drafter that served: level 2 sleep throws all weights away, waking brings back none.

The target's are the operator's to load again, as vLLM documents; the drafter's come from the copy each worker holds.
They are in before the scheduler runs: vLLM resumes it only when everything is awake, so the cache is woken last.

And nobody sleeps, wakes, pauses or resumes in the middle of a swap: vLLM's own routes wait for its end.
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
    wake_up = _wake_up(engine.wake_up)
    setattr(wake_up, _MARK, True)
    engine.sleep, engine.wake_up = _sleep(engine.sleep), wake_up
    engine.pause_generation = _pause(engine.pause_generation)
    engine.resume_generation = _resume(engine.resume_generation)


def _sleep(as_before: Any) -> Any:
    @functools.wraps(as_before)
    async def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> None:
        swapper = getattr(self, SWAPPER, None)
        if swapper is None:
            await as_before(self, level, *args, **kwargs)
            setattr(self, _SLEPT, max(level, getattr(self, _SLEPT, 0)))
            return
        await swapper.known()  # what sleeps cannot be read, and what was never read cannot be brought back
        async with swapper.lock:
            await as_before(self, level, *args, **kwargs)
            setattr(self, _SLEPT, max(level, getattr(self, _SLEPT, 0)))

    return sleep


def _wake_up(as_before: Any) -> Any:
    @functools.wraps(as_before)
    async def wake_up(self: Any, tags: list[str] | None = None) -> bool:
        swapper = getattr(self, SWAPPER, None)
        if swapper is None:
            return bool(await as_before(self, tags))
        async with swapper.lock:
            if getattr(self, _SLEPT, 0) < 2 or not (tags is None or "weights" in tags):
                return bool(await as_before(self, tags))
            awake = await as_before(self, ["weights"])
            await swapper.reload()
            setattr(self, _SLEPT, 0)
            rest = ["kv_cache"] if tags is None else [tag for tag in tags if tag != "weights"]
            return bool(await as_before(self, rest)) if rest else bool(awake)

    return wake_up


def _pause(as_before: Any) -> Any:
    @functools.wraps(as_before)
    async def pause_generation(self: Any, *args: Any, **kwargs: Any) -> None:
        swapper = getattr(self, SWAPPER, None)
        if swapper is None:
            await as_before(self, *args, **kwargs)
            return
        async with swapper.outside_pause():
            await as_before(self, *args, **kwargs)

    return pause_generation


def _resume(as_before: Any) -> Any:
    @functools.wraps(as_before)
    async def resume_generation(self: Any, *args: Any, **kwargs: Any) -> None:
        swapper = getattr(self, SWAPPER, None)
        if swapper is not None:
            await swapper.settled()
        await as_before(self, *args, **kwargs)

    return resume_generation

"""The stat logger: vLLM builds one an engine in the API server and calls it after each step."""

from __future__ import annotations

from typing import Any

from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.counting import count_step
from draftloop.serving_hooks.vllm.runtime import current
from draftloop.serving_hooks.vllm.start import start

_Base: Any = versions.stat_logger_base()


class StepCounters(_Base):  # type: ignore[misc]
    """Keeps the runtime's speculation counters. Built first thing in an API server, it is where capture begins."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._runtime = current()
        self._runtime.takes_logprobs = versions.tells_logprobs(vllm_config)
        start(self._runtime)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add one step of the engine."""
        count_step(self._runtime, scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

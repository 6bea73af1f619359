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
        if self._runtime.trouble is not None:  # an unknown release, or nobody has asked for us
            return
        self._runtime.takes_logprobs = versions.tells_logprobs(vllm_config)
        start(self._runtime)

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *rest: Any, **named: Any) -> None:
        """Add one step of the engine. Never raises: vLLM would fail every request that runs."""
        if self._runtime.trouble is not None:
            return
        try:
            count_step(self._runtime, scheduler_stats, iteration_stats)
        except Exception:  # noqa: BLE001  outermost guard: serving never fails because of a count
            self._runtime.fault()

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

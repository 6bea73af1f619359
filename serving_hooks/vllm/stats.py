"""The stat logger: vLLM builds one an engine in the API server and calls it after each step."""

from __future__ import annotations

from typing import Any

from draftloop.pipeline.records import SpecCounters
from draftloop.serving_hooks.vllm.runtime import current
from vllm.v1.metrics.loggers import StatLoggerBase


class StepCounters(StatLoggerBase):
    """Keeps the runtime's speculation counters."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._runtime = current()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add one step of the engine."""
        if iteration_stats is None:
            return
        known = self._runtime.counters
        drafts = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        self._runtime.counters = SpecCounters(
            known.num_steps + len(iteration_stats.inter_token_latencies_iter),
            known.num_emitted + iteration_stats.num_generation_tokens - len(iteration_stats.time_to_first_tokens_iter),
            known.num_drafted + (drafts.num_draft_tokens if drafts else 0),
            known.num_accepted + (drafts.num_accepted_tokens if drafts else 0),
        )

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

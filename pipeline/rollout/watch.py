"""Looking at a drafter in production: what serves, how well, and whether that breaks its promise."""

from __future__ import annotations

from draftloop.pipeline.records import SpecCounters
from draftloop.pipeline.rollout import canary, examine
from draftloop.pipeline.rollout.canary import CanaryConfig
from draftloop.pipeline.rollout.engine_client import EngineClient
from draftloop.pipeline.rollout.journal import Journal, Memory, State
from draftloop.pipeline.rollout.outcome import Outcome
from draftloop.pipeline.rollout.restore import came_late


class Watch:
    """Reads the counters of one engine."""

    def __init__(self, engine: EngineClient, journal: Journal, config: CanaryConfig) -> None:
        self._engine = engine
        self._journal = journal
        self._config = config

    def level(self, memory: Memory) -> SpecCounters:
        """Counters of the live drafter's last traffic; without a drafter, of whatever drafts in its place."""
        depth = memory.depth if self._engine.drafter_version() is not None else 0
        return canary.level((*(memory.readings or (memory.baseline,)), self._engine.counters()), depth)

    def look(self, memory: Memory, reason: str) -> tuple[Memory, Outcome, str | None]:
        """One look; the last value says why the drafter must be taken back, where it must."""
        counters, condition = self._engine.counters(), self._engine.condition()
        serving = condition.version
        if came_late(condition, memory):
            return memory, Outcome(memory.state, serving, f"the swap to version {serving} ended late"), None
        if not examine.serves(condition, memory.serving):  # loaded at boot, or by hand
            memory = self._journal.enter(
                memory,
                "LIVE",
                "found in the engine",
                version=serving,
                live=serving,
                serving=examine.found(condition, self._journal),
                readings=(counters,),
            )
        if memory.state != "WATCHING":
            state: State = memory.state if memory.state != "IDLE" or serving is None else "LIVE"
            readings = canary.recent((*memory.readings, counters), self._config.watch_steps)
            memory = self._journal.keep(memory, state=state, live=serving, readings=readings)
            return memory, Outcome(state, serving, reason), None
        return self._watched(memory, counters, serving)

    def _watched(
        self, memory: Memory, counters: SpecCounters, serving: str | None
    ) -> tuple[Memory, Outcome, str | None]:
        seen = counters.since(memory.baseline)
        if seen.num_steps < 0:
            memory = self._journal.enter(
                memory, "WATCHING", "the engine restarted: the watch begins anew", baseline=counters
            )
            return memory, Outcome("WATCHING", serving, memory.reason, decision="CONTINUE"), None
        settle = self._config.settle_steps
        if not memory.settled and seen.num_steps >= settle:
            if seen.num_steps < 2 * settle:  # a long pass is mostly settled traffic: it counts
                memory = self._journal.keep(memory, settled=True, baseline=counters)
                outcome = Outcome("WATCHING", serving, "settled: the watch begins", decision="CONTINUE")
                return memory, outcome, None
            memory = self._journal.keep(memory, settled=True)
        look = canary.judge(seen, memory.depth, self._config, expected=memory.expected, previous=memory.previous_level)
        if look.decision == "PASS":
            readings = (memory.baseline, self._engine.counters())
            memory = self._journal.enter(memory, "LIVE", look.reason, readings=readings, totals=memory.counted("live"))
        outcome = Outcome(memory.state, memory.live, look.reason, decision=look.decision)
        return memory, outcome, look.reason if look.decision == "ROLL_BACK" else None

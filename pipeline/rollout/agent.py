"""The agent follows the champion: verify, stage, swap, probe, watch, keep or take back. One agent per engine replica.

    IDLE -> VERIFYING -> STAGED -> SWAPPING -> PROBING -> WATCHING -> LIVE
                |                     |           |           |
                refused               +-----------+-----------+--> ROLLED_BACK

Each transition is on disk before the step it announces, so that a killed agent knows at its next start how far the
engine may have been changed. A drafter that was refused or taken back is not tried again until the alias moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    FingerprintMismatchError,
    InputError,
    RegistryError,
    StorageError,
    SwapFailedError,
    SwapRefusedError,
    VersionNotFoundError,
)
from draftloop.pipeline.lease import lease
from draftloop.pipeline.records import ProbeResult, SpecCounters
from draftloop.pipeline.registry.registry import Registry
from draftloop.pipeline.rollout import canary, examine, metrics
from draftloop.pipeline.rollout.canary import CanaryConfig, Decision
from draftloop.pipeline.rollout.engine_client import EngineClient
from draftloop.pipeline.rollout.journal import Journal, Memory, Served, State

NAME = "agent"  # how the agent signs in the registry


class AgentConfig(BaseModel):
    """How a drafter enters the engine and what takes it out again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    canary: CanaryConfig = CanaryConfig()
    probe_tokens: int = Field(default=16, ge=1)  # output tokens of each canary prompt
    tie_margin: float = Field(
        default=0.5, ge=0
    )  # logits: a best token leading by less may change with the batch's shape
    keep_staged: int = Field(default=3, ge=2)  # drafter folders kept
    max_interruptions: int = Field(default=2, ge=1)  # so many swaps of a version cut off: it is refused
    metrics_file: Path | None = None  # Prometheus text, for a textfile collector


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one pass did."""

    state: State
    version: str | None  # what the engine serves now
    reason: str
    swap_ms: float | None = None  # pause to resume, of a swap in this pass
    near_ties: examine.Ties | None = None  # canary outputs that differ from before that swap, each at a near tie
    decision: Decision | None = None  # of the watch

    @property
    def outputs_identical(self) -> bool | None:
        """Whether the canary outputs are those from before the swap, token by token; None without a swap."""
        return None if self.near_ties is None else not self.near_ties


class Agent:
    """Brings one engine to the registry's champion, one `reconcile` at a time."""

    def __init__(
        self,
        engine: EngineClient,
        registry: Registry,
        folder: Path,
        *,
        check_verdict: examine.CheckVerdict,
        canary_prompts: Sequence[Sequence[int]],
        config: AgentConfig | None = None,
        compare: examine.Compare | None = None,
    ) -> None:
        """folder: the agent's own; check_verdict: raises SwapRefusedError unless document, drafter digest and
        fingerprint digest belong together; canary_prompts: token ids; compare: None for `losslessness.compare_greedy`.
        """
        if not canary_prompts:
            raise ConfigError("the agent has no canary prompts", mend="give it at least one: they prove every swap")
        if compare is None:
            from draftloop.pipeline.losslessness import compare_greedy

            compare = compare_greedy
        self._engine = engine
        self._registry = registry
        self._journal = Journal(folder)
        self._check_verdict = check_verdict
        self._prompts = canary_prompts
        self._config = config or AgentConfig()
        self._compare = compare

    @property
    def last_reason(self) -> str:
        """Why the agent is in the state it is in."""
        return self._journal.read().reason

    def reconcile(self) -> Outcome:
        """One pass: finish what was cut off, read the alias, swap or watch.

        Raises LeaseHeldError while another agent holds the engine, RegistryError and StorageError where the champion
        could not be read or fetched (the engine is as it was), SwapFailedError if nothing could be loaded any more.
        """
        with lease(self._journal.lock, what="agent"):
            artifact.sweep(self._journal.folder)
            artifact.sweep(self._journal.drafters)
            memory = self._recover(self._journal.read())
            memory = self._move_alias(memory)
            memory, outcome = self._follow(memory)
            if self._config.metrics_file is not None:
                metrics.write(self._config.metrics_file, memory, self._engine.counters())
            return outcome

    # Which drafter should be live.

    def _follow(self, memory: Memory) -> tuple[Memory, Outcome]:
        serving = self._engine.drafter_version()
        champion = self._registry.champion()
        if champion is None:
            return self._look(memory, "the registry names no champion: what is live stays")
        if memory.refused.keys() - {champion.version}:
            kept = {version: why for version, why in memory.refused.items() if version == champion.version}
            memory = self._keep(memory, refused=kept)
        if champion.version not in memory.refused:
            wanted: str | None = champion.version
        else:  # a restarted engine is brought back to what was good
            wanted = memory.serving.version if memory.serving.staged else serving
        if wanted is None or wanted == serving:
            why = memory.refused.get(champion.version)
            reason = f"version {champion.version} stays refused: {why}" if why else "the champion is live"
            return self._look(memory, reason)
        return self._roll_out(memory, wanted, alias=champion.version)

    def _roll_out(self, memory: Memory, version: str, *, alias: str) -> tuple[Memory, Outcome]:
        resting = memory
        previous, level = self._previous(memory, version)
        memory = self._enter(memory, "VERIFYING", "a new champion", version=version, resting=memory.state)
        try:
            staged = examine.stage(
                self._registry,
                version,
                self._journal.place(version),
                fingerprint=self._engine.fingerprint(),
                check_verdict=self._check_verdict,
            )
        except (SwapRefusedError, CheckpointError, FingerprintMismatchError) as error:
            return self._refuse(resting, version, error.message)
        except (RegistryError, StorageError):
            self._enter(resting, resting.state, f"version {version} could not be fetched")
            raise
        memory = self._enter(memory, "STAGED", "files, verdict and target are right")
        before = self._engine.probe(self._prompts, self._config.probe_tokens)
        now = self._registry.champion()
        if now is None or now.version != alias:
            return self._rest(resting, f"the alias moved while version {version} was staged")
        try:
            artifact.verify(staged.folder, kind="drafter", error=CheckpointError)  # nobody altered it meanwhile
        except CheckpointError as error:
            return self._refuse(resting, version, error.message)
        memory = self._enter(
            memory,
            "SWAPPING",
            f"loading {staged.digest[:12]}",
            previous=previous,
            previous_level=level,
            probed=before,
            target=self._engine.fingerprint().digest,
            expected=canary.expectation_of(staged.document),
            depth=canary.depth_of(staged.document, before.counters),
        )
        return self._apply(memory, staged, before)

    def _apply(self, memory: Memory, staged: examine.Staged, before: ProbeResult) -> tuple[Memory, Outcome]:
        version = staged.version
        try:
            swapped = self._engine.swap(staged.folder, version)
            memory = self._enter(memory, "PROBING", f"loaded in {swapped.pause_ms:.0f} ms", swap_ms=swapped.pause_ms)
            examine.require_loaded(staged.tensors, swapped.tensors, version=version)
            ties, after = self._prove(before, version)
            examine.require_plausible(after.counters, version=version)
        except (EngineError, InputError) as error:
            return self._take_back(memory, error.message, result="failed")
        memory = self._enter(
            memory,
            "WATCHING",
            f"probe passed: tau {after.counters.tau:.2f}",
            live=version,
            serving=Served(version=version, digest=staged.digest, staged=True, tensors=swapped.tensors),
            baseline=self._engine.counters(),
            settled=False,
            readings=(),
            depth=max(memory.depth, canary.depth_of({}, after.counters)),
            totals=memory.counted("swapped"),
        )
        kept = {name for name in (version, memory.previous.version) if name is not None}
        self._journal.prune(kept, self._config.keep_staged)
        return memory, Outcome("WATCHING", version, memory.reason, swapped.pause_ms, ties)

    def _previous(self, memory: Memory, version: str) -> tuple[Served, SpecCounters | None]:
        """What a roll back of `version` loads, and the level it had in production. It is brought at hand now."""
        serving = self._engine.drafter_version()
        unproven = memory.state == "WATCHING" and memory.previous.version != version
        if unproven and memory.serving.version == serving:
            return memory.previous, memory.previous_level
        if serving is None:
            return Served(), self._level(memory)
        known = memory.serving if memory.serving.version == serving else Served(version=serving)
        place = self._journal.place(serving)
        try:
            if not artifact.is_complete(place):
                examine.bring(self._registry, serving, place)
            artifact.verify(place, kind="drafter", error=CheckpointError)
        except (VersionNotFoundError, CheckpointError) as error:
            self._journal.note("previous-not-at-hand", {"version": serving, "reason": error.message})
            return Served(), self._level(memory)
        known = msgspec.structs.replace(known, digest=examine.digest_of(place), staged=True)
        return known, self._level(memory)

    def _level(self, memory: Memory) -> SpecCounters:
        """Counters of the live drafter's last traffic; without a drafter, of whatever drafts in its place."""
        depth = memory.depth if self._engine.drafter_version() is not None else 0
        return canary.level((*(memory.readings or (memory.baseline,)), self._engine.counters()), depth)

    # Touching the engine.

    def _prove(self, before: ProbeResult, version: str | None) -> tuple[examine.Ties, ProbeResult]:
        found = self._engine.drafter_version()
        if found != version:
            raise SwapFailedError(f"the engine says it drafts with version {found}, not {version}")
        after = self._engine.probe(self._prompts, self._config.probe_tokens)
        return examine.require_same_outputs(before, after, self._compare, self._config.tie_margin), after

    def _take_back(self, memory: Memory, reason: str, *, result: str, alias: bool = False) -> tuple[Memory, Outcome]:
        """Load the previous drafter and prove it; where that fails, serve without one. Safe to repeat after a kill."""
        bad, previous = memory.version, memory.previous
        move_to = previous.version if alias and previous.staged else memory.alias_to
        memory = self._enter(memory, memory.state, reason, undo=reason, alias_to=move_to)
        try:
            served, swap_ms, ties = self._restore(memory, previous)
        except (EngineError, InputError) as error:
            self._journal.note("previous-failed", {"version": previous.version, "reason": error.message})
            if previous.version is None:
                raise
            served, swap_ms, ties = self._restore(memory, Served())
        memory = self._enter(
            memory,
            "ROLLED_BACK",
            reason,
            live=served.version,
            serving=served,
            undo=None,
            swap_ms=swap_ms,
            readings=(self._engine.counters(),),
            refused={**memory.refused, bad: reason} if bad is not None else memory.refused,
            totals=memory.counted(result),
        )
        memory = self._move_alias(memory)
        decision: Decision | None = "ROLL_BACK" if alias else None
        return memory, Outcome("ROLLED_BACK", served.version, reason, swap_ms, ties, decision)

    def _restore(self, memory: Memory, previous: Served) -> tuple[Served, float, examine.Ties | None]:
        folder = None
        if previous.version is not None:
            folder = self._journal.place(previous.version)
            artifact.verify(folder, kind="drafter", error=CheckpointError)
        swapped = self._engine.swap(folder, previous.version)
        examine.require_loaded(previous.tensors, swapped.tensors, version=previous.version)
        ties = None
        if memory.probed is not None and memory.target == self._engine.fingerprint().digest:
            ties, _ = self._prove(memory.probed, previous.version)
        return msgspec.structs.replace(previous, tensors=swapped.tensors), swapped.pause_ms, ties

    def _move_alias(self, memory: Memory) -> Memory:
        """Point the alias back at what is live, unless somebody moved it first; tried again at the next pass."""
        if memory.alias_to is None:
            return memory
        try:
            champion = self._registry.champion()
            if champion is not None and champion.version == memory.version:
                self._registry.set_champion(memory.alias_to, by=NAME, reason=memory.reason)
                self._journal.note("alias-moved", {"from": memory.version, "to": memory.alias_to})
        except VersionNotFoundError as error:
            self._journal.note("alias-not-moved", {"to": memory.alias_to, "reason": error.message})
        except RegistryError as error:
            self._journal.note("alias-not-moved", {"to": memory.alias_to, "reason": error.message})
            return memory
        return self._keep(memory, alias_to=None)

    # Watching.

    def _look(self, memory: Memory, reason: str) -> tuple[Memory, Outcome]:
        counters = self._engine.counters()
        serving = self._engine.drafter_version()
        if serving != memory.serving.version:  # loaded at boot, or by hand
            memory = self._enter(
                memory,
                "LIVE",
                "found in the engine",
                version=serving,
                live=serving,
                serving=Served(version=serving),
                readings=(counters,),
            )
        if memory.state != "WATCHING":
            state: State = memory.state if memory.state != "IDLE" or serving is None else "LIVE"
            readings = canary.recent((*memory.readings, counters), self._config.canary.watch_steps)
            memory = self._keep(memory, state=state, live=serving, readings=readings)
            return memory, Outcome(state, serving, reason)
        seen = counters.since(memory.baseline)
        if seen.num_steps < 0:
            memory = self._enter(memory, "WATCHING", "the engine restarted: the watch begins anew", baseline=counters)
            return memory, Outcome("WATCHING", serving, memory.reason, decision="CONTINUE")
        if not memory.settled and seen.num_steps >= self._config.canary.settle_steps:
            if (
                seen.num_steps < 2 * self._config.canary.settle_steps
            ):  # a long pass is mostly settled traffic: it counts
                memory = self._keep(memory, settled=True, baseline=counters)
                return memory, Outcome("WATCHING", serving, "settled: the watch begins", decision="CONTINUE")
            memory = self._keep(memory, settled=True)
        return self._decide(memory, seen)

    def _decide(self, memory: Memory, seen: SpecCounters) -> tuple[Memory, Outcome]:
        look = canary.judge(
            seen, memory.depth, self._config.canary, expected=memory.expected, previous=memory.previous_level
        )
        if look.decision == "ROLL_BACK":
            return self._take_back(memory, look.reason, result="rolled_back", alias=True)
        if look.decision == "PASS":
            readings = (memory.baseline, self._engine.counters())
            memory = self._enter(memory, "LIVE", look.reason, readings=readings, totals=memory.counted("live"))
        return memory, Outcome(memory.state, memory.live, look.reason, decision=look.decision)

    # Memory.

    def _recover(self, memory: Memory) -> Memory:
        """Bring a state in which an earlier agent died to one that is known."""
        if memory.state in ("VERIFYING", "STAGED") and memory.undo is None:
            reason = f"killed while {memory.state} version {memory.version}: the engine was not touched"
            return self._enter(memory, memory.resting, reason, version=memory.serving.version)
        if memory.undo is not None:
            self._journal.note("resumed", {"state": memory.state, "version": memory.version, "reason": "taking back"})
            return self._take_back(memory, memory.undo, result="rolled_back" if memory.alias_to else "failed")[0]
        if memory.state not in ("SWAPPING", "PROBING"):
            return memory
        version = str(memory.version)
        times = memory.interrupted.get(version, 0) + 1
        reason = f"killed while {memory.state} version {version} (time {times}): the previous drafter is loaded back"
        memory = self._keep(memory, interrupted={**memory.interrupted, version: times})
        memory = self._take_back(memory, reason, result="interrupted")[0]
        if times < self._config.max_interruptions:  # nothing speaks against the drafter itself yet
            return self._keep(memory, refused={key: why for key, why in memory.refused.items() if key != version})
        return memory

    def _refuse(self, resting: Memory, version: str, reason: str) -> tuple[Memory, Outcome]:
        memory = self._keep(
            resting, refused={**resting.refused, version: reason}, totals=resting.counted("refused"), reason=reason
        )
        self._journal.note("refused", {"version": version, "reason": reason, "serving": memory.live})
        return memory, Outcome(memory.state, self._engine.drafter_version(), reason)

    def _rest(self, resting: Memory, reason: str) -> tuple[Memory, Outcome]:
        memory = self._enter(resting, resting.state, reason)
        return memory, Outcome(memory.state, self._engine.drafter_version(), reason)

    def _enter(self, memory: Memory, state: State, reason: str, **changes: object) -> Memory:
        """A transition: on disk, then in the audit file."""
        changed = msgspec.structs.replace(memory, state=state, reason=reason, **changes)
        self._journal.write(changed)
        facts = {"state": state, "version": changed.version, "live": changed.live, "reason": reason}
        self._journal.note("state", {"from": memory.state, **facts})
        return changed

    def _keep(self, memory: Memory, **changes: object) -> Memory:
        changed = msgspec.structs.replace(memory, **changes)
        if changed != memory:
            self._journal.write(changed)
        return changed

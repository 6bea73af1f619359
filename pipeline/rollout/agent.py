"""The agent follows the champion: verify, stage, swap, probe, watch, keep or take back. One agent per engine replica.

    IDLE -> VERIFYING -> STAGED -> SWAPPING -> PROBING -> WATCHING -> LIVE
                |           |         |           |           |
                refused     refused   +-----------+-----------+--> ROLLED_BACK, or RESTART_NEEDED

Each transition is on disk before the step it announces, so that a killed agent knows at its next start how far the
engine may have been changed. A drafter that was refused or taken back is not tried again until the alias moves. The
link `live` names what was proven last: a restarted engine boots with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import (
    AdminDeniedError,
    CheckpointError,
    ConfigError,
    EngineError,
    EngineUnreachableError,
    EngineUnsupportedError,
    FingerprintMismatchError,
    InputError,
    RegistryError,
    ReplicaLostError,
    StorageError,
    SwapBusyError,
    SwapRefusedError,
    VersionNotFoundError,
)
from draftloop.pipeline.lease import lease
from draftloop.pipeline.records import Condition, ProbeResult, SpecCounters, Swapped
from draftloop.pipeline.registry.registry import Registry, Version
from draftloop.pipeline.rollout import canary, examine, metrics
from draftloop.pipeline.rollout.config import AgentConfig
from draftloop.pipeline.rollout.engine_audit import Forwarder
from draftloop.pipeline.rollout.engine_client import EngineClient
from draftloop.pipeline.rollout.journal import BOOT, Journal, Memory, RestartNeeded, Served
from draftloop.pipeline.rollout.outcome import Outcome
from draftloop.pipeline.rollout.proof import Prover
from draftloop.pipeline.rollout.restore import NOT_NOW, Restorer, came_late
from draftloop.pipeline.rollout.watch import Watch
from draftloop.pipeline.stream.audit import Audit

__all__ = ["NAME", "Agent", "AgentConfig", "Outcome"]

NAME = "agent"  # how the agent signs in the registry

_UNTOUCHED = (SwapRefusedError, CheckpointError, FingerprintMismatchError, InputError)  # as a swap raises them


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
        audit: Audit | None = None,
        engine_audit_file: Path | None = None,
    ) -> None:
        """folder: the agent's own; check_verdict: raises SwapRefusedError unless document, drafter digest and
        fingerprint digest belong together; canary_prompts: token ids; compare: None for `losslessness.compare_greedy`;
        audit: where the engine's own audit lines go; engine_audit_file: None for `folder`/engine-audit.jsonl.
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
        self._config = config or AgentConfig()
        self._prover = Prover(engine, canary_prompts, self._config, compare)
        self._restorer = Restorer(engine, self._journal, self._prover)
        self._watch = Watch(engine, self._journal, self._config.canary)
        file = engine_audit_file or folder / "engine-audit.jsonl"
        self._forwarder = Forwarder(file, audit, self._journal)

    @property
    def last_reason(self) -> str:
        """Why the agent is in the state it is in."""
        return self._journal.read().reason

    def reconcile(self) -> Outcome:
        """One pass: finish what was cut off, read the alias, swap or watch.

        Raises LeaseHeldError while another agent holds the engine, RegistryError and StorageError where the champion
        could not be read or fetched (the engine is as it was), EngineUnreachableError, AdminDeniedError, SwapBusyError
        and EngineUnsupportedError where the engine could not be asked (the next pass goes on from there),
        SwapFailedError if nothing could be loaded any more.
        """
        with lease(self._journal.lock, what="agent"):
            artifact.sweep(self._journal.folder)
            artifact.sweep(self._journal.drafters)
            memory = self._forwarder.forward(self._journal.read())
            memory = self._meet(memory, self._engine.condition())
            if memory.restart_needed is None:
                memory = self._recover(memory)
            if memory.restart_needed is None:
                self._restorer.mend_link(memory)
                memory = self._move_alias(memory)
                memory, outcome = self._follow(memory)
            else:
                outcome = Outcome(memory.state, self._engine.drafter_version(), memory.reason)
            memory = self._forwarder.forward(memory)
            if self._config.metrics_file is not None:
                metrics.write(self._config.metrics_file, memory, self._engine.counters())
            return outcome

    # Which drafter should be live.

    def _follow(self, memory: Memory) -> tuple[Memory, Outcome]:
        condition = self._engine.condition()
        champion = self._registry.champion()
        if champion is None:
            return self._look(memory, "the registry names no champion: what is live stays")
        if memory.refused.keys() - {champion.version}:
            kept = {version: why for version, why in memory.refused.items() if version == champion.version}
            memory = self._journal.keep(memory, refused=kept)
        wanted = self._wanted(memory, condition, champion)
        if wanted is None or examine.serves(condition, wanted):
            why = memory.refused.get(champion.version)
            reason = f"version {champion.version} stays refused: {why}" if why else "the champion is live"
            return self._look(memory, reason)
        return self._roll_out(memory, str(wanted.version), alias=champion.version)

    def _wanted(self, memory: Memory, condition: Condition, champion: Version) -> Served | None:
        """What should serve; None: what serves. A restarted engine is brought back to what was good."""
        if champion.version not in memory.refused:
            return Served(version=champion.version, digest=champion.digest)
        return memory.serving if memory.serving.staged else None

    def _roll_out(self, memory: Memory, version: str, *, alias: str) -> tuple[Memory, Outcome]:
        memory = self._journal.keep(memory, lossless=self._prover.lossless(memory.lossless))
        if self._config.sampling_check == "refuse" and memory.lossless.sampling is False:
            return self._rest(memory, f"the engine gets no drafter: {memory.lossless.reason}")
        resting = memory
        previous, level = self._previous(memory, version)
        memory = self._journal.enter(memory, "VERIFYING", "a new champion", version=version, resting=memory.state)
        try:
            staged = examine.stage(
                self._registry,
                version,
                self._journal,
                fingerprint=self._engine.fingerprint(),
                check_verdict=self._check_verdict,
            )
        except (SwapRefusedError, CheckpointError, FingerprintMismatchError) as error:
            return self._refuse(resting, version, error.message)
        except (RegistryError, StorageError, *NOT_NOW):
            self._journal.enter(resting, resting.state, f"version {version} could not be staged")
            raise
        memory = self._journal.enter(memory, "STAGED", "files, verdict and target are right")
        before = self._prover.before()
        if came_late(self._engine.condition(), resting):  # then `before` and `previous` may be of what nobody proved
            return self._rest(resting, f"the swap to version {resting.version} ended late")
        now = self._registry.champion()
        if now is None or now.version != alias:
            return self._rest(resting, f"the alias moved while version {version} was staged")
        try:
            artifact.verify(staged.folder, kind="drafter", error=CheckpointError)  # nobody altered it meanwhile
        except CheckpointError as error:
            return self._refuse(resting, version, error.message)
        memory = self._journal.enter(
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
        return self._swap(resting, memory, staged, before)

    def _swap(
        self, resting: Memory, memory: Memory, staged: examine.Staged, before: ProbeResult
    ) -> tuple[Memory, Outcome]:
        """Ask the engine, and tell apart what it refused, what it undid and what it could not."""
        version = staged.version
        try:
            swapped = self._engine.swap(staged.folder, version)
        except EngineUnreachableError:
            raise  # it may or may not have happened: the next pass takes it back
        except (SwapBusyError, AdminDeniedError, EngineUnsupportedError) as error:
            self._journal.enter(resting, resting.state, error.message)
            raise
        except ReplicaLostError as error:
            return self._lose(memory, error.message, bad=version, serving=memory.previous)
        except _UNTOUCHED as error:
            return self._refuse(resting, version, error.message)
        except EngineError as error:
            return self._take_back(memory, error.message, result="failed")
        return self._apply(memory, staged, before, swapped)

    def _apply(
        self, memory: Memory, staged: examine.Staged, before: ProbeResult, swapped: Swapped
    ) -> tuple[Memory, Outcome]:
        version = staged.version
        memory = self._journal.enter(
            memory, "PROBING", f"loaded in {swapped.pause_ms:.0f} ms", swap_ms=swapped.pause_ms
        )
        try:
            examine.require_loaded(staged.tensors, swapped.tensors, version=version)
            ties, after = self._prover.same(before, version)
            examine.require_plausible(after.counters, version=version)
            lossless = self._prover.still_lossless(memory.lossless)
        except NOT_NOW:
            raise
        except (EngineError, InputError) as error:
            return self._take_back(memory, error.message, result="failed")
        if False in (lossless.greedy, lossless.sampling):
            self._journal.note("engine-not-lossless", {"version": version, "reason": lossless.reason})
        memory = self._journal.enter(
            memory,
            "WATCHING",
            f"probe passed: tau {after.counters.tau:.2f}",
            live=version,
            serving=Served(version=version, digest=staged.digest, staged=True, tensors=swapped.tensors),
            baseline=self._engine.counters(),
            settled=False,
            readings=(),
            depth=max(memory.depth, canary.depth_of({}, after.counters)),
            lossless=lossless,
            totals=memory.counted("swapped"),
        )
        self._journal.point_live(version)
        kept = {name for name in (version, memory.previous.version) if name is not None}
        self._journal.prune(kept, self._config.keep_staged)
        return memory, Outcome("WATCHING", version, memory.reason, swapped.pause_ms, ties)

    def _previous(self, memory: Memory, version: str) -> tuple[Served, SpecCounters | None]:
        """What a roll back of `version` loads, and the level it had in production. It is brought at hand now."""
        condition = self._engine.condition()
        unproven = memory.state == "WATCHING" and memory.previous.version != version
        if unproven and examine.serves(condition, memory.serving):
            return memory.previous, memory.previous_level
        if condition.version is None:
            return Served(), self._watch.level(memory)
        same = examine.serves(condition, memory.serving)
        known = memory.serving if same else examine.found(condition, self._journal)
        try:
            known = examine.at_hand(self._registry, known, self._journal)
        except (VersionNotFoundError, CheckpointError) as error:
            self._journal.note("previous-not-at-hand", {"version": condition.version, "reason": error.message})
            return Served(), self._watch.level(memory)
        return known, self._watch.level(memory)

    def _look(self, memory: Memory, reason: str) -> tuple[Memory, Outcome]:
        memory, outcome, breach = self._watch.look(memory, reason)
        return (
            (memory, outcome) if breach is None else self._take_back(memory, breach, result="rolled_back", alias=True)
        )

    # Going back.

    def _take_back(self, memory: Memory, reason: str, *, result: str, alias: bool = False) -> tuple[Memory, Outcome]:
        """Load the previous drafter and prove it; where that fails, serve without one. Safe to repeat after a kill."""
        bad, previous = memory.version, memory.previous
        known_to_registry = previous.staged and previous.version != BOOT
        move_to = previous.version if alias and known_to_registry else memory.alias_to
        memory = self._journal.enter(memory, memory.state, reason, undo=reason, alias_to=move_to)
        try:
            back = self._restorer.restore(memory, previous)
        except ReplicaLostError as error:
            return self._lose(memory, error.message, bad=bad, serving=previous)
        memory = self._journal.enter(
            memory,
            "ROLLED_BACK",
            reason,
            live=back.served.version,
            serving=back.served,
            undo=None,
            swap_ms=back.swap_ms,
            readings=(self._engine.counters(),),
            refused={**memory.refused, bad: reason} if bad is not None else memory.refused,
            totals=memory.counted(result),
        )
        memory = self._move_alias(memory)
        return memory, Outcome(
            "ROLLED_BACK", back.served.version, reason, back.swap_ms, back.ties, "ROLL_BACK" if alias else None
        )

    def _lose(self, memory: Memory, reason: str, *, bad: str | None, serving: Served) -> tuple[Memory, Outcome]:
        """Nothing can be loaded into this process any more: say so, and let its successor boot with what was good."""
        if (
            serving.staged
            and serving.version is not None
            and artifact.is_complete(self._journal.place(serving.version))
        ):
            self._journal.point_live(serving.version)
        condition = self._engine.condition()
        memory = self._journal.enter(
            memory,
            "RESTART_NEEDED",
            f"restart this replica: {reason}",
            restart_needed=RestartNeeded(reason, condition.boot_id),
            boot_id=condition.boot_id,
            live=condition.version,
            serving=serving,
            undo=None,
            refused=memory.refused if bad is None else {**memory.refused, bad: reason},
            totals=memory.counted("lost"),
        )
        return memory, Outcome("RESTART_NEEDED", condition.version, memory.reason)

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
        return self._journal.keep(memory, alias_to=None)

    # What earlier processes left, the agent's and the engine's.

    def _meet(self, memory: Memory, condition: Condition) -> Memory:
        """Notice an engine that was restarted, and one that must be."""
        lost, boot_id = memory.restart_needed, condition.boot_id
        if lost is not None and lost.boot_id == boot_id:
            return memory
        anew = {"boot_id": boot_id, "baseline": SpecCounters(), "readings": (), "restart_needed": None}
        if lost is not None:
            memory = self._journal.enter(memory, "IDLE", f"the replica was restarted, after: {lost.reason}", **anew)
        elif memory.boot_id and memory.boot_id != boot_id:
            self._journal.note("engine-restarted", {"version": condition.version})
            memory = self._journal.keep(memory, **anew)
        elif memory.boot_id != boot_id:
            memory = self._journal.keep(memory, boot_id=boot_id)
        if condition.restart_needed is None:
            return memory
        cut_off = memory.undo is not None or memory.state in ("SWAPPING", "PROBING")
        bad, serving = (memory.version, memory.previous) if cut_off else (None, memory.serving)
        return self._lose(memory, condition.restart_needed, bad=bad, serving=serving)[0]

    def _recover(self, memory: Memory) -> Memory:
        """Bring a state in which an earlier agent died to one that is known."""
        if memory.state in ("VERIFYING", "STAGED") and memory.undo is None:
            reason = f"killed while {memory.state} version {memory.version}: the engine was not touched"
            return self._journal.enter(memory, memory.resting, reason, version=memory.serving.version)
        if memory.undo is not None:
            self._journal.note("resumed", {"state": memory.state, "version": memory.version, "reason": "taking back"})
            return self._take_back(memory, memory.undo, result="rolled_back" if memory.alias_to else "failed")[0]
        if memory.state not in ("SWAPPING", "PROBING"):
            return self._recover_late(memory)
        version = str(memory.version)
        times = memory.interrupted.get(version, 0) + 1
        reason = f"killed while {memory.state} version {version} (time {times}): the previous drafter is loaded back"
        memory = self._journal.keep(memory, interrupted={**memory.interrupted, version: times})
        memory = self._take_back(memory, reason, result="interrupted")[0]
        if times < self._config.max_interruptions:  # nothing speaks against the drafter itself yet
            kept = {key: why for key, why in memory.refused.items() if key != version}
            return self._journal.keep(memory, refused=kept)
        return memory

    def _recover_late(self, memory: Memory) -> Memory:
        """Take back a version that came after it was given up: as the champion it is swapped in anew, and proven."""
        if not came_late(self._engine.condition(), memory):
            return memory
        refused = memory.refused
        reason = f"the swap to version {memory.version} ended late: the previous drafter is loaded back"
        memory = self._take_back(memory, reason, result="interrupted")[0]
        return self._journal.keep(memory, refused=refused)

    def _refuse(self, resting: Memory, version: str, reason: str) -> tuple[Memory, Outcome]:
        memory = self._journal.keep(
            resting, refused={**resting.refused, version: reason}, totals=resting.counted("refused"), reason=reason
        )
        self._journal.note("refused", {"version": version, "reason": reason, "serving": memory.live})
        return memory, Outcome(memory.state, self._engine.drafter_version(), reason)

    def _rest(self, resting: Memory, reason: str) -> tuple[Memory, Outcome]:
        memory = self._journal.enter(resting, resting.state, reason)
        return memory, Outcome(memory.state, self._engine.drafter_version(), reason)

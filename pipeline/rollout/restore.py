"""Bringing the previous drafter back, and proving that it is back."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import (
    AdminDeniedError,
    CheckpointError,
    EngineError,
    EngineUnreachableError,
    EngineUnsupportedError,
    InputError,
    ReplicaLostError,
    SwapBusyError,
    SwapRefusedError,
)
from draftloop.pipeline.records import Condition
from draftloop.pipeline.rollout import examine
from draftloop.pipeline.rollout.engine_client import EngineClient
from draftloop.pipeline.rollout.journal import Journal, Memory, Served
from draftloop.pipeline.rollout.proof import Prover

# Nothing about the drafter: the same step is tried again at a later pass.
NOT_NOW = (EngineUnreachableError, AdminDeniedError, EngineUnsupportedError, SwapBusyError)


def came_late(condition: Condition, memory: Memory) -> bool:
    """Whether an engine serves the version last under way, which the agent had given up and never proved."""
    version = condition.version
    return version is not None and version == memory.version and version != memory.serving.version


class Restored(NamedTuple):
    """What serves again."""

    served: Served
    swap_ms: float | None  # None: the engine had it already
    ties: examine.Ties | None  # None: nothing to compare with


class Restorer:
    """Loads back. The link `live` goes first: an engine that restarts in the middle boots with what is wanted."""

    def __init__(self, engine: EngineClient, journal: Journal, prover: Prover) -> None:
        self._engine = engine
        self._journal = journal
        self._prover = prover

    def restore(self, memory: Memory, previous: Served) -> Restored:
        """The previous drafter, or none where that fails.

        Raises ReplicaLostError where the engine can have neither, EngineError where it would not now.
        """
        steps = [self._as_it_is] if self._has(previous) else []
        for step in (*steps, self._load):
            try:
                return step(memory, previous)
            except (*NOT_NOW, ReplicaLostError):
                raise  # the undo stays on disk
            except (EngineError, InputError) as error:
                self._journal.note("previous-failed", {"version": previous.version, "reason": error.message})
                if step == self._load and previous.version is None and not isinstance(error, SwapRefusedError):
                    raise
                reason = error.message
        try:
            return self._load(memory, Served())
        except SwapRefusedError as error:
            raise ReplicaLostError(f"{reason}; {error.message}", mend=error.mend) from error

    def mend_link(self, memory: Memory) -> None:
        """Let `live` name what serves and was proven, whatever a kill or a person left there."""
        served = memory.serving
        if not served.staged or served.version is None or not examine.serves(self._engine.condition(), served):
            return
        was = self._journal.live_version()
        if was != served.version and artifact.is_complete(self._journal.place(served.version)):
            self._journal.point_live(served.version)
            self._journal.note("live-link-mended", {"from": was, "to": served.version})

    def _has(self, previous: Served) -> bool:
        """Whether the engine undid a swap by itself, or was restarted: it names the very tensors."""
        condition = self._engine.condition()
        return bool(previous.version and condition.tensors) and examine.serves(condition, previous)

    def _as_it_is(self, memory: Memory, previous: Served) -> Restored:
        if previous.version is not None and previous.staged:
            self._journal.point_live(previous.version)
        return Restored(previous, None, self._prove(memory, previous))

    def _load(self, memory: Memory, previous: Served) -> Restored:
        folder = None
        if previous.version is not None:
            folder = self._journal.place(previous.version)
            artifact.verify(folder, kind="drafter", error=CheckpointError)
            self._journal.point_live(previous.version)
        swapped = self._engine.swap(folder, previous.version)
        if folder is None:
            self._journal.point_live(None)
        examine.require_loaded(previous.tensors, swapped.tensors, version=previous.version)
        ties = self._prove(memory, previous)
        return Restored(msgspec.structs.replace(previous, tensors=swapped.tensors), swapped.pause_ms, ties)

    def _prove(self, memory: Memory, previous: Served) -> examine.Ties | None:
        if memory.probed is None or memory.target != self._engine.fingerprint().digest:
            return None
        return self._prover.same(memory.probed, previous.version)[0]

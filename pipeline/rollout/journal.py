"""What the agent remembers: a state file replaced in one step, an audit file that only grows, staged drafters."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import StorageError, VersionNotFoundError
from draftloop.pipeline.records import ProbeResult, SpecCounters
from draftloop.pipeline.rollout.canary import Expectation

State = Literal["IDLE", "VERIFYING", "STAGED", "SWAPPING", "PROBING", "WATCHING", "LIVE", "ROLLED_BACK"]


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter the agent loaded or found loaded. version None: no drafter."""

    version: str | None = None
    digest: str = ""  # of its folder; empty: not known
    staged: bool = False  # its folder lies in staging, verified
    tensors: str = ""  # digest of the loaded tensors


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's state file."""

    state: State = "IDLE"
    live: str | None = None  # version the engine serves by our last knowledge
    serving: Served = Served()
    version: str | None = None  # version under way, or last dealt with
    resting: State = "IDLE"  # where a version under way that never touches the engine leads back to
    target: str = ""  # Fingerprint.digest of the engine at the last swap
    previous: Served = Served()  # what a roll back loads
    previous_level: SpecCounters | None = None  # its last traffic
    probed: ProbeResult | None = None  # canary prompts before the swap
    expected: Expectation | None = None  # what the verdict of the version under way promises
    depth: int = 1  # K
    settled: bool = False  # whether the steps right after the swap are over
    baseline: SpecCounters = SpecCounters()  # engine counters when the watch began
    readings: tuple[SpecCounters, ...] = ()  # engine counters at earlier passes with the live drafter, oldest first
    undo: str | None = None  # why the version under way is being taken back; set before the engine is touched
    alias_to: str | None = None  # champion version the alias still has to move to
    refused: dict[str, str] = msgspec.field(default_factory=dict)  # version -> reason, until the alias moves
    interrupted: dict[str, int] = msgspec.field(default_factory=dict)  # version -> swaps that were cut off
    swap_ms: float | None = None
    totals: dict[str, int] = msgspec.field(default_factory=dict)  # result -> swaps
    reason: str = ""  # of the last transition

    def counted(self, result: str) -> dict[str, int]:
        """The totals with one more swap of this result."""
        return {**self.totals, result: self.totals.get(result, 0) + 1}


class Journal:
    """Files of one agent: `state.json`, `audit.jsonl`, `agent.lock`, `drafters/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = folder / "agent.lock"
        self.drafters = folder / "drafters"
        self._state = folder / "state.json"
        self._audit = folder / "audit.jsonl"

    def read(self) -> Memory:
        """The last state written; the initial one where there is none. Raises StorageError for another form."""
        if not self._state.is_file():
            return Memory()
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=Memory)
        except msgspec.MsgspecError as error:
            raise StorageError(
                f"the agent's state file {self._state} cannot be read: {error}",
                mend="move it away; the agent then starts from what the engine serves",
            ) from error

    def write(self, memory: Memory) -> None:
        """Replace the state file. Raises StorageError."""
        artifact.write_json(self._state, msgspec.to_builtins(memory))

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Append what happened, when and why; never content. Raises StorageError."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._audit.open("a") as stream:
                stream.write(json.dumps(line, sort_keys=True) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise StorageError(f"writing {self._audit} failed: {error}", mend="free disk space") from error

    def place(self, version: str) -> Path:
        """Where a version's drafter is staged. Raises VersionNotFoundError for what is no version of the registry."""
        if not version or Path(version).name != version:
            raise VersionNotFoundError(f"the registry has no version {version!r}", mend="boot without a drafter")
        return self.drafters / version

    def prune(self, keep: set[str], num_kept: int) -> None:
        """Remove staged drafters but the `num_kept` newest and those named."""
        if not self.drafters.is_dir():
            return
        newest = sorted(self.drafters.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for place in newest[num_kept:]:
            if place.name not in keep:
                shutil.rmtree(place, ignore_errors=True)

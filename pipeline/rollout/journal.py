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
from draftloop.pipeline.lossless_probe import Plain
from draftloop.pipeline.records import ProbeResult, SpecCounters
from draftloop.pipeline.rollout.canary import Expectation

BOOT = "boot"  # version label of the drafter of an engine's first start: no registry knows it

State = Literal[
    "IDLE", "VERIFYING", "STAGED", "SWAPPING", "PROBING", "WATCHING", "LIVE", "ROLLED_BACK", "RESTART_NEEDED"
]


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter the agent loaded or found loaded. version None: no drafter."""

    version: str | None = None
    digest: str = ""  # of its folder; empty: not known
    staged: bool = False  # its folder lies in staging, verified
    tensors: str = ""  # digest of the loaded tensors


class RestartNeeded(msgspec.Struct, frozen=True):
    """Why only a restart helps, and of which process."""

    reason: str
    boot_id: str


class Lossless(msgspec.Struct, frozen=True, kw_only=True):
    """What the last losslessness probe of an engine process found; None: not asked, or not answered."""

    boot_id: str = ""
    version: str | None = None  # of the drafter it was asked with
    greedy: bool | None = None
    sampling: bool | None = None
    reason: str = ""
    plain: Plain | None = None  # sampled without speculation: good for as long as this process runs


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
    boot_id: str = ""  # of the engine process these counters are of
    restart_needed: RestartNeeded | None = None  # nothing is swapped until another process answers
    lossless: Lossless = Lossless()
    forwarded_bytes: int = 0  # of the engine's own audit file: what is on the audit topic

    def counted(self, result: str) -> dict[str, int]:
        """The totals with one more swap of this result."""
        return {**self.totals, result: self.totals.get(result, 0) + 1}


class Journal:
    """Files of one agent: `state.json`, `audit.jsonl`, `agent.lock`, `drafters/`, `verdicts/`, the link `live`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = folder / "agent.lock"
        self.drafters = folder / "drafters"
        self.verdicts = folder / "verdicts"
        self.live = folder / "live"
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

    def enter(self, memory: Memory, state: State, reason: str, **changes: object) -> Memory:
        """A transition: on disk, then in the audit file. Raises StorageError."""
        changed = msgspec.structs.replace(memory, state=state, reason=reason, **changes)
        self._write(changed)
        facts = {"state": state, "version": changed.version, "live": changed.live, "reason": reason}
        self.note("state", {"from": memory.state, **facts})
        return changed

    def keep(self, memory: Memory, **changes: object) -> Memory:
        """Changes that are no transition. Raises StorageError."""
        changed = msgspec.structs.replace(memory, **changes)
        if changed != memory:
            self._write(changed)
        return changed

    def _write(self, memory: Memory) -> None:
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

    def verdict_file(self, version: str) -> Path:
        """Where the engine looks for a version's signed verdict. Raises as `place`."""
        return self.verdicts / f"{self.place(version).name}.json"

    def live_version(self) -> str | None:
        """The version that the link `live` names, which a restarted engine boots with."""
        return self.live.readlink().name if self.live.is_symlink() else None

    def point_live(self, version: str | None) -> None:
        """Let `live` name a staged version, in one step; None: there is no such link. Raises StorageError."""
        if self.live_version() == version:
            return
        beside = self.folder / ".live.next"
        try:
            beside.unlink(missing_ok=True)
            if version is None:
                self.live.unlink(missing_ok=True)
            else:
                beside.symlink_to(Path("drafters") / self.place(version).name)
                os.replace(beside, self.live)
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(
                f"cannot point {self.live} at version {version}: {error}", mend="free disk space or fix the rights"
            ) from error

    def prune(self, keep: set[str], num_kept: int) -> None:
        """Remove staged drafters and their verdicts but the `num_kept` newest, those named, `boot` and `live`."""
        kept = keep | {BOOT, self.live_version() or BOOT}
        if not self.drafters.is_dir():
            return
        newest = sorted(self.drafters.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        own = [place for place in newest if place.name != BOOT]
        for place in own[num_kept:]:
            if place.name not in kept:
                shutil.rmtree(place, ignore_errors=True)
                (self.verdicts / f"{place.name}.json").unlink(missing_ok=True)

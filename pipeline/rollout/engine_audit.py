"""What was asked of an engine's swap route, from the engine's own file onto the audit topic."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from draftloop.pipeline.errors import BrokerError, MissingTopicError, StorageError
from draftloop.pipeline.rollout.journal import Journal, Memory
from draftloop.pipeline.stream.audit import Audit, AuditRecord

_AT_MOST = 1000  # lines a pass


class _Line(msgspec.Struct):
    time: float  # Unix time, seconds
    act: Literal["drafter.swap"]
    outcome: Literal["done", "refused", "failed", "denied", "abandoned"]
    version: str | None = None
    digest: str | None = None
    reason: str | None = None
    serving: str | None = None


class Forwarder:
    """Brings the file's new lines to the topic at each pass; where the topic is away, at a later one."""

    def __init__(self, file: Path, audit: Audit | None, journal: Journal) -> None:
        """audit: None forwards nothing."""
        self._file = file
        self._audit = audit
        self._journal = journal
        self._waits = ""  # why lines wait, as last noted

    def forward(self, memory: Memory) -> Memory:
        """Raises StorageError where the journal cannot be written."""
        if self._audit is None:
            return memory
        try:
            end, odd = forward(self._file, memory.forwarded_bytes, self._audit, by="engine")
        except (BrokerError, StorageError, MissingTopicError) as error:
            if self._waits != error.message:
                self._journal.note("audit-waits", {"reason": error.message})
            self._waits = error.message
            return memory
        self._waits = ""
        if odd:
            self._journal.note("audit-lines-unreadable", {"count": odd, "file": self._file.name})
        return self._journal.keep(memory, forwarded_bytes=end)


def forward(path: Path, start: int, audit: Audit, *, by: str) -> tuple[int, int]:
    """Record every whole line from byte `start` on; returns (byte after the last one, lines that are none).

    A file shorter than that was begun anew. A kill between record and return repeats lines: an audit topic may repeat
    itself, it may not forget. Raises what the audit raises, and StorageError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return start, 0
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", mend="fix the file's rights") from error
    odd = 0
    with os.fdopen(descriptor, "rb") as stream:
        if os.fstat(descriptor).st_size < start:
            start = 0
        stream.seek(start)
        for _ in range(_AT_MOST):
            raw = stream.readline()
            if not raw.endswith(b"\n"):
                break
            record = _record(raw, by)
            if record is None:
                odd += 1
            else:
                audit.record(record)
            start += len(raw)
    return start, odd


def _record(raw: bytes, by: str) -> AuditRecord | None:
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    details = {"digest": line.digest, "reason": line.reason, "serving": line.serving}
    return AuditRecord(
        time_ms=int(line.time * 1000),
        act=line.act,
        outcome=line.outcome,
        by=by,
        subject=f"drafter {line.version or 'unnamed'}",
        details={name: value for name, value in details.items() if value is not None},
    )

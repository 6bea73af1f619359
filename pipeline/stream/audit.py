"""Who did what and when: one record on the audit topic before an act and one after it. Content never enters it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol

import msgspec

from draftloop.pipeline.stream.log import CaptureLog, LogEntry, StoredEntry

AUDIT_TOPIC = "draftloop.audit"
AUDIT_SCHEMA = 1

Act = Literal[
    "access.change",  # topics, users, ACLs, quotas
    "access.verify",
    "broker.start",
    "broker.stop",
    "window.read",  # a training run reads captured requests
    "champion.promote",
    "champion.rollback",
    "drafter.swap",  # somebody asked an engine's admin route for another drafter
    "unreadable",  # no act: read_audit's word for an entry of the topic that is no audit record
]


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the audit topic. Details are names, offsets and counts; never content, never a secret."""

    schema: int = AUDIT_SCHEMA
    time_ms: int
    act: Act
    outcome: Literal["begun", "done", "failed", "refused", "denied", "abandoned"]
    by: str  # who decided: a person, or a process's principal
    subject: str  # what it was done to: a topic, a version, a cluster
    details: dict[str, str] = msgspec.field(default_factory=dict)


class Audit(Protocol):
    """Where audit records go. `record` returns when the record is durable, or raises: an act unseen is not done."""

    def record(self, record: AuditRecord) -> None: ...


class MemoryAudit:
    """The in-memory twin."""

    def __init__(self) -> None:
        self.records: list[AuditRecord] = []

    def record(self, record: AuditRecord) -> None:
        self.records.append(record)


class LogAudit:
    """Audit on a capture log's audit topic; the topic must exist."""

    def __init__(self, log: CaptureLog) -> None:
        self._log = log

    def record(self, record: AuditRecord) -> None:
        self._log.append(AUDIT_TOPIC, [LogEntry(record.subject.encode(), msgspec.msgpack.encode(record))])


@contextmanager
def audited(
    audit: Audit, act: Act, *, by: str, subject: str, details: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Record an act around the block: "begun" before it (or it does not happen), "done" or "failed" after it."""

    def tell(outcome: Literal["begun", "done", "failed"], more: Mapping[str, str]) -> None:
        now = time.time_ns() // 1_000_000
        noted = {**(details or {}), **more}
        audit.record(AuditRecord(time_ms=now, act=act, outcome=outcome, by=by, subject=subject, details=noted))

    tell("begun", {})
    try:
        yield
    except BaseException as error:
        tell("failed", {"error": type(error).__name__})  # the class only: a message may quote what must not be kept
        raise
    tell("done", {})


_WRONG = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)


def read_audit(log: CaptureLog) -> list[AuditRecord]:
    """Every audit record still there, oldest first. Raises MissingTopicError.

    An entry that is none comes as a record of the act "unreadable" that names its place, and nothing of its bytes.
    """
    found: list[tuple[int, int, int, AuditRecord]] = []
    starts = log.start_offsets(AUDIT_TOPIC)
    for partition, stop in log.end_offsets(AUDIT_TOPIC).items():
        for entry in log.read(AUDIT_TOPIC, partition, starts[partition], stop):
            record = _record(entry)
            found.append((record.time_ms, partition, entry.offset, record))
    return [record for *_, record in sorted(found, key=lambda item: item[:3])]


def _record(entry: StoredEntry) -> AuditRecord:
    try:
        record = msgspec.msgpack.decode(entry.value, type=AuditRecord)
        if record.act != "unreadable":
            return record
    except _WRONG:
        pass  # whoever wrote it must not hide what the others did
    return AuditRecord(
        time_ms=entry.time_ms,
        act="unreadable",
        outcome="failed",
        by="unknown",
        subject=AUDIT_TOPIC,
        details={"partition": str(entry.partition), "offset": str(entry.offset)},
    )

"""Audit: nothing happens before its record, every record tells its end, and a roll back never waits for a broker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from draftloop.pipeline.audit_report import audit_lines, describe
from draftloop.pipeline.config import load
from draftloop.pipeline.errors import (
    BrokerUnreachableError,
    DraftloopError,
    MissingTopicError,
    StorageError,
    VersionNotFoundError,
)
from draftloop.pipeline.registry.audited import AuditedRegistry
from draftloop.pipeline.registry.registry import MemoryRegistry
from draftloop.pipeline.stream.audit import (
    AUDIT_TOPIC,
    Act,
    AuditRecord,
    LogAudit,
    MemoryAudit,
    audited,
    read_audit,
)
from draftloop.pipeline.stream.audit_spool import SpooledAudit
from draftloop.pipeline.stream.log import LogEntry, MemoryLog
from draftloop.pipeline.workspace import Workspace


class Breakable(MemoryLog):
    """A log with an audit topic that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.create_topic(AUDIT_TOPIC, num_partitions=1)
        self.up = True

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        if not self.up:
            raise BrokerUnreachableError("broker is down")
        super().append(topic, entries)


def line(act: Act = "access.change", subject: str = "s", time_ms: int = 5) -> AuditRecord:
    return AuditRecord(time_ms=time_ms, act=act, outcome="done", by="ana", subject=subject)


def spooled(log: Breakable, folder: Path) -> tuple[SpooledAudit, list[DraftloopError]]:
    told: list[DraftloopError] = []
    return SpooledAudit(lambda: log, folder / "spool", on_waiting=told.append), told


def test_an_act_leaves_one_record_before_it_and_one_after_it() -> None:
    audit = MemoryAudit()
    with audited(audit, "window.read", by="curator", subject="raw", details={"partition 0": "3..9"}):
        assert [record.outcome for record in audit.records] == ["begun"]
    assert [(r.act, r.outcome, r.by, r.subject, r.details) for r in audit.records] == [
        ("window.read", "begun", "curator", "raw", {"partition 0": "3..9"}),
        ("window.read", "done", "curator", "raw", {"partition 0": "3..9"}),
    ]


def test_a_failed_act_is_recorded_by_its_class_never_by_its_message() -> None:
    audit = MemoryAudit()
    with pytest.raises(ValueError, match="prompt"), audited(audit, "window.read", by="c", subject="raw"):
        raise ValueError("the prompt was: secret")
    assert [(record.outcome, record.details) for record in audit.records] == [
        ("begun", {}),
        ("failed", {"error": "ValueError"}),
    ]


def test_an_act_that_cannot_be_recorded_does_not_happen() -> None:
    log = Breakable()
    log.up = False
    done = []
    with pytest.raises(BrokerUnreachableError), audited(LogAudit(log), "window.read", by="c", subject="raw"):
        done.append(1)
    assert done == []


def test_records_are_read_back_oldest_first() -> None:
    log = Breakable()
    for subject in ("a", "b", "c"):
        LogAudit(log).record(line(subject=subject))
    assert [record.subject for record in read_audit(log)] == ["a", "b", "c"]


NO_RECORDS = {
    "bytes": b"\xc1",
    "nothing": b"",
    "words": b"poke",
    "another map": msgspec.msgpack.encode({"schema": 1}),
    "an act of another": msgspec.msgpack.encode({**msgspec.to_builtins(line()), "act": "poke"}),
    "a forged mark": msgspec.msgpack.encode(line("unreadable", subject="a look-alike")),
    "no UTF-8": b"\x81\xa3act\xa1\xff",
    "depth": b"\x91" * 100_000,
}


@pytest.mark.parametrize("value", NO_RECORDS.values(), ids=NO_RECORDS.keys())
def test_an_entry_that_is_no_record_is_shown_by_its_place_among_the_others(value: bytes) -> None:
    log = Breakable()
    LogAudit(log).record(line(subject="a", time_ms=0))
    log.append(AUDIT_TOPIC, [LogEntry(b"", value)])
    LogAudit(log).record(line(subject="b", time_ms=2**60))
    details = {"partition": "0", "offset": "1"}
    unreadable = AuditRecord(
        time_ms=2, act="unreadable", outcome="failed", by="unknown", subject=AUDIT_TOPIC, details=details
    )
    assert read_audit(log) == [line(subject="a", time_ms=0), unreadable, line(subject="b", time_ms=2**60)]


def test_the_report_lists_every_entry_and_says_how_many_are_no_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace(load([], [f"work='{tmp_path}'"]))
    log = workspace.open_log()
    log.append(AUDIT_TOPIC, [LogEntry(b"", b"CANARY"), LogEntry(b"", b"CANARY")])
    LogAudit(log).record(line("window.read", subject="raw\x1b[2J\n", time_ms=2**60))
    log.close()
    lines = audit_lines(workspace)
    assert [each["act"] for each in lines] == ["unreadable", "unreadable", "window.read"]
    assert lines[2]["time"] == f"{2**60} ms"
    said = capfd.readouterr().err
    assert "2 entries of draftloop.audit are no audit records" in said
    assert "draftloop access verify" in said
    shown = describe(lines)
    assert [each.isprintable() for each in shown.split("\n")] == [True, True, True]
    assert r"raw\x1b[2J\n" in shown
    assert "CANARY" not in shown + said + str(lines)
    assert [each["act"] for each in audit_lines(workspace, act="window")] == ["window.read"]
    assert "2 entries" in capfd.readouterr().err


def test_without_an_audit_topic_nothing_is_recorded_and_it_is_said() -> None:
    with pytest.raises(MissingTopicError, match=r"draftloop\.audit"):
        LogAudit(MemoryLog()).record(line())


def test_a_promotion_that_cannot_be_recorded_leaves_the_alias(tmp_path: Path) -> None:
    log = Breakable()
    audit, told = spooled(log, tmp_path)
    log.up = False
    registry = AuditedRegistry(MemoryRegistry(), audit)
    with pytest.raises(BrokerUnreachableError):
        registry.promote("1", by="ana", reason="better")
    assert registry.champion() is None
    assert told == []
    assert (tmp_path / "spool").read_bytes() == b""


def test_a_refused_promotion_is_on_record_as_failed(tmp_path: Path) -> None:
    log = Breakable()
    registry = AuditedRegistry(MemoryRegistry(), spooled(log, tmp_path)[0])
    with pytest.raises(VersionNotFoundError):
        registry.promote("1", by="ana", reason="better")
    assert [(r.act, r.outcome, r.by, r.subject) for r in read_audit(log)] == [
        ("champion.promote", "begun", "ana", "candidate 1"),
        ("champion.promote", "failed", "ana", "candidate 1"),
    ]


def test_a_roll_back_goes_on_while_the_log_is_down_and_its_records_follow(tmp_path: Path) -> None:
    log = Breakable()
    audit, told = spooled(log, tmp_path)
    log.up = False
    with audited(audit, "champion.rollback", by="ana", subject="champion 2"):
        pass
    assert [type(error) for error in told] == [BrokerUnreachableError, BrokerUnreachableError]
    assert read_audit(log) == []
    log.up = True
    audit.record(line(subject="later", time_ms=2**60))
    assert [(record.outcome, record.subject) for record in read_audit(log)] == [
        ("begun", "champion 2"),
        ("done", "champion 2"),
        ("done", "later"),
    ]
    audit.record(line(subject="again"))
    assert len(read_audit(log)) == 4  # what waited was delivered once


def test_a_damaged_spool_is_kept_and_named(tmp_path: Path) -> None:
    (tmp_path / "spool").write_bytes(b"{half\n")
    audit, _ = spooled(Breakable(), tmp_path)
    with pytest.raises(StorageError, match="spool is damaged"):
        audit.record(line())
    assert (tmp_path / "spool").read_bytes() == b"{half\n"

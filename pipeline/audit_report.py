"""The audit topic for a person or a program to read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from draftloop.pipeline.errors import ConfigError
from draftloop.pipeline.stream.audit import AUDIT_TOPIC, read_audit
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.workspace import Workspace


def audit_lines(
    workspace: Workspace, *, act: str | None = None, since: str | None = None, screen: Screen | None = None
) -> list[dict[str, Any]]:
    """Records as plain values with the time in ISO 8601, oldest first. Raises ConfigError for a time that is none.

    Says on the screen how many entries of the topic are no audit records, whatever is asked for.
    """
    first_ms = _milliseconds(since) if since else 0
    log = workspace.open_log(make_topics=False)
    try:
        records = read_audit(log)
    finally:
        log.close()
    num_unreadable = sum(record.act == "unreadable" for record in records)
    if num_unreadable:
        (screen or Screen()).say(
            f"{num_unreadable} entries of {AUDIT_TOPIC} are no audit records\n"
            "  mend: find out who else may write the topic: `draftloop access verify`"
        )
    return [
        {"time": _shown_time(record.time_ms), **msgspec.to_builtins(record)}
        for record in records
        if record.time_ms >= first_ms and record.act.startswith(act or "")
    ]


def describe(lines: list[dict[str, Any]]) -> str:
    """One line a record, whatever is in its texts."""
    shown = [
        f"{line['time'][:23]}  {line['act']:<18} {line['outcome']:<6} {line['by']:<20} {line['subject']}"
        + "".join(f"  {key}={value}" for key, value in sorted(line["details"].items()))
        for line in lines
    ]
    return "\n".join(map(_printable, shown)) or "no records"


def _printable(text: str) -> str:
    """The text without what would steer a terminal: anybody who may write the topic chose it."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _shown_time(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"  # no clock wrote that


def _milliseconds(since: str) -> int:
    try:
        moment = datetime.fromisoformat(since)
    except ValueError as error:
        raise ConfigError(f"--since {since}: not a time", mend="write 2026-11-30 or 2026-11-30T12:00") from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)

"""The audit topic for a person or a program to read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from draftloop.pipeline.errors import ConfigError
from draftloop.pipeline.stream.audit import read_audit
from draftloop.pipeline.workspace import Workspace


def audit_lines(workspace: Workspace, *, act: str | None = None, since: str | None = None) -> list[dict[str, Any]]:
    """Records as plain values with the time in ISO 8601, oldest first. Raises ConfigError for a time that is none."""
    first_ms = _milliseconds(since) if since else 0
    log = workspace.open_log(make_topics=False)
    try:
        records = read_audit(log)
    finally:
        log.close()
    return [
        {"time": datetime.fromtimestamp(record.time_ms / 1000, UTC).isoformat(), **msgspec.to_builtins(record)}
        for record in records
        if record.time_ms >= first_ms and record.act.startswith(act or "")
    ]


def describe(lines: list[dict[str, Any]]) -> str:
    """One line a record."""
    shown = [
        f"{line['time'][:23]}  {line['act']:<18} {line['outcome']:<6} {line['by']:<20} {line['subject']}"
        + "".join(f"  {key}={value}" for key, value in sorted(line["details"].items()))
        for line in lines
    ]
    return "\n".join(shown) or "no records"


def _milliseconds(since: str) -> int:
    try:
        moment = datetime.fromisoformat(since)
    except ValueError as error:
        raise ConfigError(f"--since {since}: not a time", mend="write 2026-11-30 or 2026-11-30T12:00") from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)

"""Audit records on their way to the log: what must not wait for a broker is kept in a file until the broker is back."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from draftloop.pipeline.errors import BrokerError, DraftloopError, MissingTopicError, StorageError
from draftloop.pipeline.stream.audit import AuditRecord, LogAudit
from draftloop.pipeline.stream.log import CaptureLog

# Taking a drafter back must work while the log is down; everything else is refused when it cannot be recorded.
URGENT = frozenset({"champion.rollback"})


class SpooledAudit:
    """Audit over a log opened for each record; urgent records that cannot be delivered wait in `spool`, in order."""

    def __init__(
        self, open_log: Callable[[], CaptureLog], spool: Path, *, on_waiting: Callable[[DraftloopError], None]
    ) -> None:
        """on_waiting is told why a record had to stay in the spool."""
        self._open_log = open_log
        self._spool = spool
        self._on_waiting = on_waiting

    def record(self, record: AuditRecord) -> None:
        """Deliver what waits, then this record. Not urgent: raises BrokerError, StorageError, MissingTopicError."""
        with self._locked() as file:
            waiting = self._waiting(file)
            try:
                self._deliver([*waiting, record])
            except (BrokerError, StorageError, MissingTopicError) as error:
                if record.act not in URGENT:
                    raise
                file.write(msgspec.json.encode(record) + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._on_waiting(error)
            else:
                # A kill before this line delivers twice: an audit topic may repeat itself, it may not forget.
                file.truncate(0)

    def _waiting(self, file: BinaryIO) -> list[AuditRecord]:
        try:
            return [msgspec.json.decode(line, type=AuditRecord) for line in file.read().splitlines()]
        except msgspec.MsgspecError as error:
            raise StorageError(
                f"audit spool {self._spool} is damaged: {error}", mend="move it away and keep it: it is evidence"
            ) from error

    def _deliver(self, records: list[AuditRecord]) -> None:
        log = self._open_log()
        try:
            audit = LogAudit(log)
            for record in records:
                audit.record(record)
        finally:
            log.close()

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        try:
            self._spool.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._spool, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise StorageError(
                f"audit spool {self._spool}: {error.strerror}", mend="fix the folder's rights"
            ) from error
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

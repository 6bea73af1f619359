"""The sender: one thread that brings what is queued into the log, for as long as that takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from draftloop.pipeline.errors import AppendError, DraftloopError
from draftloop.pipeline.stream.log import LogEntry
from draftloop.serving_hooks.outbox import CaptureLimits, Outbox, unpack


class Sink(Protocol):
    """The part of a CaptureLog that the hook needs."""

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        """As CaptureLog.append: all arrived, or AppendError tells what did not, or another error: nothing did."""

    def close(self) -> None:
        """Release it."""


class Sender:
    """Takes batches and appends them, with a log opened anew after every failure, until the outbox is closed."""

    def __init__(self, outbox: Outbox, open_log: Callable[[], Sink], topic: str, limits: CaptureLimits) -> None:
        self._outbox = outbox
        self._open_log = open_log
        self._topic = topic
        self._limits = limits
        self._log: Sink | None = None

    def run(self) -> None:
        """The thread's life."""
        failures = 0
        while batch := self._outbox.take():
            if self._deliver(batch):
                failures = 0
                continue
            self._release()  # after the batch was given back: a client may take its time to close
            failures += 1
            if self._outbox.pause(self._delay(failures)):
                failures = 0
        self._release()

    def _deliver(self, batch: list[bytes]) -> bool:
        """One attempt; False where something is to be tried again, with another log."""
        entries = [unpack(entry) for entry in batch]
        try:
            if self._log is None:
                self._log = self._open_log()
            self._log.append(self._topic, entries)
        except AppendError as error:
            known = range(len(batch))
            failed = {index: _reason(each) for index, each in error.failed.items() if index in known}
            refused = {
                index: _reason(each) for index, each in error.refused.items() if index in known and index not in failed
            }
            why = next((type(each).__name__ for each in error.failed.values()), None)
            self._outbox.settle(batch, refused, failed, error=why)
            return not failed
        except BaseException as error:  # noqa: BLE001  the thread's outermost guard: whatever a client raises is tried again
            failed = dict.fromkeys(range(len(batch)), _reason(error))
            self._outbox.settle(batch, {}, failed, error=type(error).__name__)
            return False
        self._outbox.settle(batch, {}, {})
        return True

    def _delay(self, failures: int) -> float:
        """Doubling with jitter: replicas that lost a broker together do not come back together."""
        longest = min(self._limits.retry_first_s * 2.0 ** min(failures - 1, 30), self._limits.retry_most_s)
        return longest * random.uniform(0.5, 1.0)

    def _release(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            try:
                log.close()
            except BaseException:  # noqa: BLE001  a log that failed may fail to close; nothing depends on it
                return


def _reason(error: BaseException) -> str:
    return error.reason if isinstance(error, DraftloopError) else DraftloopError.reason

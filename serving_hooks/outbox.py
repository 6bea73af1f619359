"""The bounded queue between the serving path and the sender, and the account of every record that was offered.

offered == delivered + sum(dropped) + in_queue holds at every moment, whatever the log does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

# What an entry costs beside the bytes of its key and value: tuple, two headers of bytes objects, time, slot of the
# queue and the allocator's rounding. A test measures it.
ENTRY_BYTES = 256

# Key, value, monotonic second of the offer. A plain tuple: the garbage collector stops visiting it after one look,
# where a full queue of objects or NamedTuples would lengthen every full collection of the engine's process.
Queued = tuple[bytes, bytes, float]


class CaptureLimits(BaseModel):
    """Bounds of the queue and of the sender. Bytes are memory, overhead included."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_records: int = Field(default=20_000, ge=1)
    max_bytes: int = Field(default=64 * 2**20, ge=1)  # of queue and batch in flight
    max_record_bytes: int = Field(default=900_000, ge=1)  # under the usual 1 MB of a broker
    batch_records: int = Field(default=256, ge=1)
    batch_bytes: int = Field(default=2**20, ge=1)  # a client library holds a batch as a whole
    linger_s: float = Field(default=0.05, ge=0)  # a batch gathers that long: 20 wake-ups a second, not one a request
    retry_first_s: float = Field(default=0.1, gt=0)
    retry_most_s: float = Field(default=2.0, gt=0)
    retry_for_s: float = Field(default=600.0, gt=0)  # what failed and is older is counted under what kept it


class Outbox:
    """Thread-safe. One taker at a time: what it took stays in flight until it is settled or given up."""

    def __init__(self, limits: CaptureLimits) -> None:
        self._limits = limits
        self._lock = threading.RLock()  # guards everything below; never held during I/O
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Queued] = deque()
        self._in_flight: list[Queued] = []
        self._queued_bytes = 0
        self._offered = 0
        self._delivered = 0
        self._dropped: dict[str, int] = {}
        self._send_errors = 0  # attempts that failed, mended or not
        self._last_error: str | None = None
        self._wants = 0  # queued bytes the waiting taker is to be woken at; 0: it does not wait
        self._flushing = 0
        self._closing = False
        self._given_up = False
        self._closed_to_offers: str | None = None  # the reason

    # A signal handler may raise out of the three methods that the serving path calls, after any call in them. So what
    # belongs together in the account is changed with no call in between, and the lock is the plain one: a Condition
    # runs Python of its own before it lets go.

    def put(self, key: bytes, value: bytes) -> None:
        """Queue an entry, or count why not."""
        entry = (key, value, time.monotonic())
        size = _size(entry)
        with self._lock:
            reason = self._refusal(size)
            if reason is not None:
                self._count(reason)
                return
            self._offered += 1
            self._queued_bytes += size
            self._queue.append(entry)
            if self._wants and self._has(self._wants):
                self._changed.notify_all()
                self._wants = 0

    def would_refuse(self, size: int) -> bool:
        """Whether an entry of at least that size has no place now; counts it as dropped if so."""
        with self._lock:
            reason = self._refusal(size + ENTRY_BYTES)
            if reason is not None:
                self._count(reason)
            return reason is not None

    def refuse(self, reason: str) -> None:
        """Count an offer that comes to nothing."""
        with self._lock:
            self._count(reason)

    def take(self) -> list[Queued]:
        """Wait for entries, let a batch gather, and take it; empty: the outbox is closed and nothing is left."""
        with self._changed:
            self._wants = 1
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._wants = self._limits.batch_bytes
            self._changed.wait_for(self._batch_is_due, self._limits.linger_s)
            self._wants = 0
            batch: list[Queued] = []
            size = 0
            while self._queue and len(batch) < self._limits.batch_records:
                size += _size(self._queue[0])
                if batch and size > self._limits.batch_bytes:
                    break
                batch.append(self._queue.popleft())
            self._in_flight = batch
            return batch

    def settle(
        self,
        batch: list[Queued],
        refused: Mapping[int, str],
        failed: Mapping[int, str],
        *,
        error: str | None = None,
    ) -> None:
        """What became of a batch: index -> reason of what never will arrive, and of what is to be tried again.

        All others count as delivered. A batch given up meanwhile has been counted: its late fate changes nothing.
        """
        settled = sum(_size(entry) for index, entry in enumerate(batch) if index not in failed)
        with self._changed:
            if self._in_flight is not batch:
                return
            self._in_flight = []
            self._last_error = error
            self._send_errors += error is not None
            self._delivered += len(batch) - len(refused) - len(failed)
            for reason in refused.values():
                self._drop(reason)
            self._queued_bytes -= settled
            self._queue.extendleft(batch[index] for index in sorted(failed, reverse=True))
            if failed:
                self._expire(failed[max(failed)])
            self._changed.notify_all()

    def pause(self, delay_s: float) -> bool:
        """Wait before the next attempt; True at once where the outbox starts to close: it is now or never."""
        with self._changed:
            closing = self._closing
            return self._changed.wait_for(lambda: self._given_up or self._closing != closing, delay_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or in flight; False when time ran out."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._queue and not self._in_flight, timeout_s)
            self._flushing -= 1
            return done

    def close(self, timeout_s: float) -> bool:
        """Refuse new entries, wait for the rest, then count what is left; True where nothing was."""
        self.refuse_all("closed")
        with self._changed:
            self._closing = True
        drained = self.flush(timeout_s)
        with self._changed:
            self._given_up = True
            self._drop("unknown_at_exit", len(self._in_flight))
            self._in_flight = []
            self._drop("closed", len(self._queue))
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
        return drained

    def refuse_all(self, reason: str) -> None:
        """From now on nothing is taken: every offer is counted under that reason, the first one given."""
        with self._changed:
            self._closed_to_offers = self._closed_to_offers or reason

    @property
    def last_error(self) -> str | None:
        """Class name of what made the last attempt fail; None where it did not."""
        return self._last_error

    def counters(self) -> dict[str, int]:
        """offered, delivered, in_queue, queue_bytes, send_errors and one `dropped.<reason>` each."""
        with self._changed:
            return {
                "offered": self._offered,
                "delivered": self._delivered,
                "in_queue": len(self._queue) + len(self._in_flight),
                "queue_bytes": self._queued_bytes,
                "send_errors": self._send_errors,
                **{f"dropped.{reason}": count for reason, count in sorted(self._dropped.items()) if count},
            }

    def _refusal(self, size: int) -> str | None:
        limits = self._limits
        if self._closed_to_offers:
            return self._closed_to_offers
        if size > limits.max_record_bytes + ENTRY_BYTES:
            return "too_large"
        if len(self._queue) + len(self._in_flight) >= limits.max_records:
            return "queue_full_records"
        if self._queued_bytes + size > limits.max_bytes:
            return "queue_full_bytes"
        return None

    def _count(self, reason: str) -> None:
        """An offer that came to nothing."""
        dropped = self._dropped.get(reason, 0) + 1
        self._dropped[reason] = dropped
        self._offered += 1

    def _drop(self, reason: str, count: int = 1) -> None:
        """What had been queued and is no more."""
        self._dropped[reason] = self._dropped.get(reason, 0) + count

    def _has(self, num_bytes: int) -> bool:
        return self._queued_bytes >= num_bytes or len(self._queue) >= self._limits.batch_records

    def _batch_is_due(self) -> bool:
        return self._has(self._limits.batch_bytes) or self._flushing > 0 or self._closing

    def _expire(self, reason: str) -> None:
        oldest = time.monotonic() - self._limits.retry_for_s
        while self._queue and self._queue[0][2] < oldest:
            self._queued_bytes -= _size(self._queue.popleft())
            self._drop(reason)


def _size(entry: Queued) -> int:
    return len(entry[0]) + len(entry[1]) + ENTRY_BYTES

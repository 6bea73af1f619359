"""The bounded queue between the serving path and the log, and the account of every record that was offered.

What is offered waits as a parcel until the packer makes an entry of it; entries wait until the sender brings them into
the log. offered == delivered + sum(dropped) + in_queue holds at every moment, whatever the log does.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from draftloop.pipeline.stream.log import LogEntry

# An entry waits as one bytes object: time of the offer, length of the key, key, value. That is nothing the garbage
# collector counts or visits: a queue that fills does not bring on full collections of the engine's process.
_HEAD = struct.Struct("<dI")
# What it costs beside key and value: this head, that of a bytes object, a slot of the queue, the allocator's rounding.
# A test measures it.
ENTRY_BYTES = 80


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


# What was offered and is no entry yet: memory it is counted with, monotonic time of the offer, what it is made of.
# A plain tuple: it is made on the serving path.
Parcel = tuple[int, float, Any]

# Parcels are heavy, an id being an object: they get this share of the bytes, and what does not fit is packed where it
# was offered.
PARCEL_SHARE = 4
_LOOK_S = 0.02  # the packer looks that often: to wake it would cost the serving path more than all the rest
_SPELL_S, _REST_S = 0.0003, 0.0001  # it lets go of the interpreter after each spell of packing


class Outbox:
    """Thread-safe. One packer and one taker at a time: what it took stays in flight until it is settled or given up."""

    def __init__(self, limits: CaptureLimits) -> None:
        self._limits = limits
        self._most_held, self._most_queued = limits.max_records, limits.max_bytes
        self._most_unpacked = limits.max_bytes // PARCEL_SHARE
        self._lock = threading.RLock()  # guards everything below; never held during I/O
        self._changed = threading.Condition(self._lock)
        self._urged = threading.Condition(self._lock)
        self._parcels: deque[Parcel | bytes] = deque()  # appended to under the lock, popped from by the packer alone
        self._unpacked = 0  # parcels queued and in the packer's hands
        self._unpacked_bytes = 0
        self._spell_began = 0.0
        self._queue: deque[bytes] = deque()  # appended to under the lock, popped from by the taker alone
        self._in_flight: list[bytes] = []
        self._held = 0  # parcels, and entries queued and in flight
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

    # A signal handler may raise out of the methods that the serving path calls, after any call in them. So what
    # belongs together in the account is changed with no call in between, and the lock is the plain one: a Condition
    # runs Python of its own before it lets go.

    def hand_over(self, content: Any, size: int) -> bool:
        """Queue a parcel that takes at most that much memory, or count why not; False: no room but for an entry."""
        parcel = size, time.monotonic(), content
        with self._lock:
            queued = self._queued_bytes + size
            unpacked = self._unpacked_bytes + size
            if unpacked > self._most_unpacked or queued > self._most_queued:
                return False
            if self._closed_to_offers is not None or self._held >= self._most_held:
                self._count(self._closed_to_offers or "queue_full_records")
                return True
            self._offered += 1
            self._held += 1
            self._unpacked += 1
            self._unpacked_bytes = unpacked
            self._queued_bytes = queued
            self._parcels.append(parcel)
            return True

    def put(self, key: bytes, value: bytes) -> None:
        """Queue an entry behind all parcels, or count why not."""
        entry = _entry(time.monotonic(), key, value)
        size = _size(entry)
        with self._lock:
            reason = self._refusal(size)
            if reason is not None:
                self._count(reason)
                return
            self._offered += 1
            self._held += 1
            self._queued_bytes += size
            if self._unpacked:
                self._unpacked += 1
                self._unpacked_bytes += size
                self._parcels.append(entry)
                return
            self._queue.append(entry)
            if self._wants and self._has(self._wants):
                self._changed.notify_all()
                self._wants = 0

    def next_parcel(self) -> Parcel | bytes | None:
        """Wait for a parcel, or an entry put behind some; None: the outbox is closed and nothing is left to pack."""
        if self._parcels and not self._is_urgent() and time.monotonic() - self._spell_began > _SPELL_S:
            time.sleep(_REST_S)
            self._spell_began = time.monotonic()
        with self._urged:
            while not self._parcels:
                if self._closing:
                    return None
                self._urged.wait(_LOOK_S)
                self._spell_began = time.monotonic()
            return self._parcels.popleft()

    def pack(self, parcel: Parcel, key: bytes, value: bytes) -> None:
        """A parcel has become this entry."""
        size, since, _ = parcel
        self._settle_parcel(size, _entry(since, key, value))

    def pass_on(self, entry: bytes) -> None:
        """An entry that was put behind parcels has none before it any more."""
        self._settle_parcel(_size(entry), entry)

    def reject(self, parcel: Parcel, reason: str) -> None:
        """A parcel cannot become an entry."""
        self._settle_parcel(parcel[0], reason)

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

    def take(self) -> list[bytes]:
        """Wait for entries, let a batch gather, and take it; empty: the outbox is closed and nothing is left."""
        with self._changed:
            self._wants = 1
            self._changed.wait_for(lambda: self._queue or self._given_up or (self._closing and not self._unpacked))
            self._wants = self._limits.batch_bytes
            self._changed.wait_for(self._batch_is_due, self._limits.linger_s)
            self._wants = 0
            queue = self._queue
        # Without the lock: a taker that loses the interpreter here must not make the serving path wait for it.
        batch: list[bytes] = []
        size = 0
        while queue and len(batch) < self._limits.batch_records:
            size += _size(queue[0])
            if batch and size > self._limits.batch_bytes:
                break
            batch.append(queue.popleft())
        with self._lock:
            if self._given_up:  # and counted
                return []
            self._in_flight = batch
        return batch

    def settle(
        self, batch: list[bytes], refused: Mapping[int, str], failed: Mapping[int, str], *, error: str | None = None
    ) -> None:
        """What became of a batch: index -> reason of what never will arrive, and of what is to be tried again.

        All others count as delivered. A batch given up meanwhile has been counted: its late fate changes nothing.
        """
        settled = sum(_size(entry) for index, entry in enumerate(batch) if index not in failed)
        again = [batch[index] for index in sorted(failed, reverse=True)]
        with self._lock:
            if self._in_flight is not batch:
                return
            self._in_flight = []
            self._last_error = error
            self._send_errors += error is not None
            self._held -= len(batch) - len(again)
            self._queued_bytes -= settled
            self._delivered += len(batch) - len(again) - len(refused)
            for reason in refused.values():
                self._drop(reason)
            self._queue.extendleft(again)
            self._changed.notify_all()
        if failed:
            self._expire(failed[max(failed)])

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
            self._urged.notify_all()
            done = self._changed.wait_for(lambda: not self._held, timeout_s)
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
            self._drop("closed", self._held - len(self._in_flight))
            self._parcels, self._queue, self._in_flight = deque(), deque(), []
            self._held = self._queued_bytes = self._unpacked = self._unpacked_bytes = 0
            self._changed.notify_all()
            self._urged.notify_all()
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
                "in_queue": self._held,
                "queue_bytes": self._queued_bytes,
                "send_errors": self._send_errors,
                **{f"dropped.{reason}": count for reason, count in sorted(self._dropped.items()) if count},
            }

    def _settle_parcel(self, size: int, outcome: bytes | str) -> None:
        entry = outcome if isinstance(outcome, bytes) else b""
        reason = outcome if isinstance(outcome, str) else None
        if _size(entry) > self._limits.max_record_bytes + ENTRY_BYTES:
            reason = "too_large"
        with self._lock:
            if self._given_up:  # and counted
                return
            self._unpacked -= 1
            self._unpacked_bytes -= size
            self._queued_bytes -= size
            if reason is None:
                self._queued_bytes += _size(entry)
                self._queue.append(entry)
            else:
                self._held -= 1
                self._drop(reason)
            if not self._unpacked or (self._wants and self._has(self._wants)):
                self._changed.notify_all()  # the taker; who flushes or closes too, when nothing is left to pack
                self._wants = 0

    def _is_urgent(self) -> bool:
        return self._flushing > 0 or self._closing

    def _refusal(self, size: int) -> str | None:
        limits = self._limits
        if self._closed_to_offers:
            return self._closed_to_offers
        if size > limits.max_record_bytes + ENTRY_BYTES:
            return "too_large"
        if self._held >= limits.max_records:
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
        return self._queued_bytes - self._unpacked_bytes >= num_bytes or len(self._queue) >= self._limits.batch_records

    def _batch_is_due(self) -> bool:
        return self._has(self._limits.batch_bytes) or (self._is_urgent() and not self._unpacked)

    def _expire(self, reason: str) -> None:
        """Count what has waited too long. The taker's own: nobody else pops."""
        oldest = time.monotonic() - self._limits.retry_for_s
        queue, count, size = self._queue, 0, 0
        while queue and _HEAD.unpack_from(queue[0])[0] < oldest:
            size += _size(queue.popleft())
            count += 1
        with self._lock:
            if not self._given_up:
                self._held -= count
                self._queued_bytes -= size
                self._drop(reason, count)
                self._changed.notify_all()


def _entry(since: float, key: bytes, value: bytes) -> bytes:
    return b"".join((_HEAD.pack(since, len(key)), key, value))


def unpack(entry: bytes) -> LogEntry:
    """What was put, from what was taken."""
    _, key = _HEAD.unpack_from(entry)
    return LogEntry(entry[_HEAD.size : _HEAD.size + key], entry[_HEAD.size + key :])


def _size(entry: bytes) -> int:
    return len(entry) - _HEAD.size + ENTRY_BYTES

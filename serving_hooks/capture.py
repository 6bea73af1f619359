"""The capture hook: runs inside the engine's process, so it never blocks, never raises and never grows without bound.

`offer` decides (default deny) and puts references into a queue that is bounded in records and bytes. A sender thread
opens the log when there is something to send, packs, and appends in batches. What is not delivered is counted by
reason: offered == delivered + sum(dropped) + in_queue, at every moment.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from draftloop.pipeline.records import (
    CapturedRequest,
    Consent,
    FinishReason,
    Sampling,
    encode,
    pack_floats,
    pack_ids,
)
from draftloop.pipeline.stream.log import CaptureLog, LogEntry
from draftloop.pipeline.stream.policy import ConsentPolicy, decide

_FIXED_BYTES = 512  # of a record beside its ids, for the queue's byte budget


class CaptureLimits(BaseModel):
    """Bounds of the queue and of the sender."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_records: int = Field(default=20_000, ge=1)
    max_bytes: int = Field(default=64 * 2**20, ge=1)
    max_record_bytes: int = Field(default=900_000, ge=1)  # under the usual 1 MB of a broker
    batch_records: int = Field(default=256, ge=1)
    retry_first_s: float = Field(default=0.1, gt=0)
    retry_most_s: float = Field(default=10.0, gt=0)
    max_attempts: int = Field(default=8, ge=1)  # appends of one batch before it is counted as lost (log_error)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished choice of a request as an engine hands it in: references, nothing packed yet."""

    request_id: str
    conversation_id: str
    tenant: str
    subject: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    sampling: Sampling
    logprobs: tuple[float, ...] | None = None
    accepted: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    drafter_version: str | None = None
    slices: Mapping[str, str] = field(default_factory=dict)
    choice: int = 0
    time_ms: int | None = None  # None: the moment of the offer

    @property
    def size(self) -> int:
        """Bytes it will take, to within the small fields."""
        logprobs = len(self.logprobs) if self.logprobs else 0
        ids = len(self.prompt_ids) + len(self.output_ids) + logprobs
        return _FIXED_BYTES + 4 * ids + len(self.accepted) + len(self.drafted)


@dataclass(frozen=True, slots=True)
class _Queued:
    request: FinishedRequest
    consent: Consent
    time_ms: int
    size: int


class CaptureHook:
    """Thread-safe. The sender is a daemon thread that starts with the first request that may be kept."""

    def __init__(
        self,
        open_log: Callable[[], CaptureLog],
        *,
        topic: str,
        policy: ConsentPolicy,
        target: str,
        limits: CaptureLimits | None = None,
    ) -> None:
        """open_log is called by the sender, again and again until it works. target: digest of the fingerprint."""
        self._open_log = open_log
        self._topic = topic
        self._policy = policy
        self._target = target
        self._limits = limits or CaptureLimits()
        self._changed = threading.Condition()  # guards everything below; never held during I/O
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0  # of queue and batch in flight
        self._in_flight = 0
        self._offered = 0
        self._delivered = 0
        self._dropped: Counter[str] = Counter()
        self._errors = 0  # failed attempts, mended or not
        self._closing = False
        self._give_up = False
        self._sender: threading.Thread | None = None

    def set_policy(self, policy: ConsentPolicy) -> None:
        """Decide by this policy from the next offer on."""
        self._policy = policy

    def offer(self, request: FinishedRequest) -> None:
        """Take a finished request, or count why not. Never blocks, never raises."""
        try:
            self._offer(request)
        except Exception:  # noqa: BLE001  outermost guard: capture never fails a request
            self._refuse("unexpected")

    def counters(self) -> dict[str, int]:
        """offered, delivered, in_queue, queue_bytes, send_errors and one `dropped.<reason>` each."""
        with self._changed:
            return {
                "offered": self._offered,
                "delivered": self._delivered,
                "in_queue": len(self._queue) + self._in_flight,
                "queue_bytes": self._queued_bytes,
                "send_errors": self._errors,
                **{f"dropped.{reason}": count for reason, count in sorted(self._dropped.items()) if count},
            }

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued; False when time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._in_flight, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Deliver what is queued within the time, count the rest as dropped; True where all was delivered."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        drained = self.flush(timeout_s)
        with self._changed:
            self._give_up = True
            self._dropped["closed"] += len(self._queue)
            self._queued_bytes -= sum(queued.size for queued in self._queue)
            self._queue.clear()
            self._changed.notify_all()
        return drained

    def _offer(self, request: FinishedRequest) -> None:
        decision = decide(self._policy, request.tenant, request.request_id)
        if decision.consent is None:
            self._refuse(f"policy:{decision.reason}")
            return
        size = request.size
        now = request.time_ms if request.time_ms is not None else time.time_ns() // 1_000_000
        with self._changed:
            reason = self._refusal(size)
            if reason is None:
                self._ensure_sender()
                self._queue.append(_Queued(request, decision.consent, now, size))
                self._queued_bytes += size
                self._changed.notify_all()
            else:
                self._dropped[reason] += 1
            self._offered += 1

    def _refusal(self, size: int) -> str | None:
        limits = self._limits
        if self._closing:
            return "closed"
        if size > limits.max_record_bytes:
            return "too_large"
        if len(self._queue) + self._in_flight >= limits.max_records:
            return "queue_full_records"
        if self._queued_bytes + size > limits.max_bytes:
            return "queue_full_bytes"
        return None

    def _refuse(self, reason: str) -> None:
        with self._changed:
            self._dropped[reason] += 1
            self._offered += 1

    def _ensure_sender(self) -> None:
        if self._sender is None:
            sender = threading.Thread(target=self._send, name="capture-sender", daemon=True)
            sender.start()
            self._sender = sender

    def _send(self) -> None:
        """The sender thread."""
        log: CaptureLog | None = None
        while batch := self._take():
            log = self._deliver(batch, log)
        if log is not None:
            _close_quietly(log)

    def _take(self) -> list[_Queued]:
        """The next batch; empty when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._limits.batch_records))]
            self._in_flight = len(batch)
            return batch

    def _deliver(self, batch: list[_Queued], log: CaptureLog | None) -> CaptureLog | None:
        """Encode and append with back-off. Returns the log for the next batch, None to open it anew."""
        entries, lost = self._encode(batch)
        reason = "log_error"
        for attempt in range(self._limits.max_attempts if entries else 0):
            if attempt and not self._back_off(attempt):
                reason = "closed"
                break
            try:
                if log is None:
                    log = self._open_log()
                log.append(self._topic, entries)
            except Exception:  # noqa: BLE001  whatever a client raises: try again with a new log
                with self._changed:
                    self._errors += 1
                if log is not None:
                    _close_quietly(log)
                    log = None
            else:
                self._settle(batch, len(entries), lost)
                return log
        self._settle(batch, 0, lost + Counter({reason: len(entries)}))
        return log

    def _settle(self, batch: list[_Queued], delivered: int, lost: Counter[str]) -> None:
        """Move a batch from in flight to its fate, all at once: the counters add up at every moment."""
        with self._changed:
            self._delivered += delivered
            self._dropped.update(lost)
            self._in_flight = 0
            self._queued_bytes -= sum(queued.size for queued in batch)
            self._changed.notify_all()

    def _back_off(self, attempt: int) -> bool:
        """Wait before the next attempt; False when the hook gave up meanwhile."""
        delay = min(self._limits.retry_first_s * 2 ** (attempt - 1), self._limits.retry_most_s)
        with self._changed:
            return not self._changed.wait_for(lambda: self._give_up, delay)

    def _encode(self, batch: list[_Queued]) -> tuple[list[LogEntry], Counter[str]]:
        """The records as log entries, and how many cannot be written, by reason."""
        entries: list[LogEntry] = []
        lost: Counter[str] = Counter()
        for queued in batch:
            try:
                value = encode(_record(queued, self._target))
                key = queued.request.conversation_id.encode()
            except (OverflowError, TypeError, ValueError):
                lost["unexpected"] += 1
                continue
            if len(value) > self._limits.max_record_bytes:
                lost["too_large"] += 1
            else:
                entries.append(LogEntry(key, value))
        return entries, lost


def _record(queued: _Queued, target: str) -> CapturedRequest:
    request = queued.request
    return CapturedRequest(
        record_id=request.request_id if request.choice == 0 else f"{request.request_id}-{request.choice}",
        time_ms=queued.time_ms,
        conversation_id=request.conversation_id,
        tenant=request.tenant,
        subject=request.subject,
        consent=queued.consent,
        target=target,
        drafter_version=request.drafter_version,
        prompt_ids=pack_ids(request.prompt_ids),
        output_ids=pack_ids(request.output_ids),
        finish_reason=request.finish_reason,
        sampling=request.sampling,
        logprobs=pack_floats(request.logprobs) if request.logprobs else None,
        accepted=request.accepted,
        drafted=request.drafted,
        slices=dict(request.slices),
    )


def _close_quietly(log: CaptureLog) -> None:
    try:
        log.close()
    except Exception:  # noqa: BLE001  a log that failed may fail to close; nothing depends on it
        return

"""The capture hook: runs inside the engine's process, so it never blocks, never raises and never grows without bound.

`offer` decides (default deny) and hands over within a bound of records and memory. A packer thread makes bytes of it; a
sender thread opens the log when there is something to send and appends in batches, through outages of any length; what
is not delivered is counted by reason.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from time import time_ns

from draftloop.pipeline.records import Consent
from draftloop.pipeline.stream.policy import Assertion, ConsentPolicy, decide
from draftloop.serving_hooks.finished import FinishedRequest, Later, hold, pack
from draftloop.serving_hooks.outbox import CaptureLimits, Outbox
from draftloop.serving_hooks.packer import Packer
from draftloop.serving_hooks.sender import Sender, Sink

__all__ = ["CaptureHook", "CaptureLimits", "FinishedRequest"]

_MOST_STANDING = 4096
_NUM_THREADS = 2  # the packer and the sender


class CaptureHook:
    """Thread-safe. Packer and sender are daemon threads that start with the first request that is kept.

    A process forked after that neither sends nor waits: the queue is its parent's, and what the child offers is counted
    there as dropped.forked. Forked before, it has a hook of its own.
    """

    def __init__(
        self,
        open_log: Callable[[], Sink],
        *,
        topic: str,
        policy: ConsentPolicy,
        target: str,
        limits: CaptureLimits | None = None,
    ) -> None:
        """open_log is called by the sender, again and again until it works. target: digest of the fingerprint."""
        self._rules: tuple[ConsentPolicy, dict[tuple[str, Assertion | None], Consent]] = policy, {}  # and what stands
        self._target = target
        self._open_log = open_log
        self._topic = topic
        self._limits = limits or CaptureLimits()
        self._threads: list[threading.Thread] = []
        self._begin()
        os.register_at_fork(after_in_child=partial(_renew, weakref.ref(self)))

    def set_policy(self, policy: ConsentPolicy) -> None:
        """Decide by this policy from the next offer on."""
        self._rules = policy, {}

    def offer(self, request: FinishedRequest) -> None:
        """Take a finished request, or count why not. Never blocks, never raises."""
        try:
            self._offer(request)
        except Exception:  # noqa: BLE001  outermost guard: capture never fails a request
            self._outbox.refuse("unexpected")

    def admits(self, tenant: str, request_id: str, asserted: Assertion | None) -> bool:
        """Whether a request that begins now may be kept; counts it as offered and dropped if not."""
        return self._consent(tenant, request_id, asserted) is not None

    def offer_later(
        self, tenant: str, request_id: str, asserted: Assertion | None, size: int, make: Callable[[], FinishedRequest]
    ) -> None:
        """As offer, of what `make` puts together in another thread; until then it takes at most `size` bytes."""
        try:
            consent = self._consent(tenant, request_id, asserted)
            if consent is None:
                return
            if len(self._threads) < _NUM_THREADS:
                self._start()
            if not self._outbox.hand_over(Later((make, consent, time_ns() // 1_000_000)), size):
                self._offer(make())
        except Exception:  # noqa: BLE001  outermost guard: capture never fails a request
            self._outbox.refuse("unexpected")

    def counters(self) -> dict[str, int]:
        """offered, delivered, in_queue, queue_bytes, send_errors and one `dropped.<reason>` each."""
        return self._outbox.counters()

    @property
    def last_error(self) -> str | None:
        """Class name of what keeps records from the log; None while the last attempt went well."""
        return self._outbox.last_error

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued; False when time ran out."""
        return self._outbox.flush(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Deliver what is queued within the time; True where all was.

        The rest is counted: `closed` was not handed to the log, `unknown_at_exit` was, without an answer yet.
        """
        deadline = time.monotonic() + timeout_s
        drained = self._outbox.close(timeout_s)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))  # the sender closes the log
        return drained

    def refuse(self, reason: str) -> None:
        """Count a request that no policy can allow, as offered and dropped."""
        self._outbox.refuse(reason)

    def _consent(self, tenant: str, request_id: str, asserted: Assertion | None) -> Consent | None:
        """The policy's of this moment; None, counted, where it has none."""
        policy, standing = self._rules
        consent = standing.get((tenant, asserted))
        if consent is not None:
            return consent
        consent, reason = decide(policy, tenant, request_id, asserted=asserted)
        if consent is None:
            self._outbox.refuse(f"policy:{reason}")
        elif policy.stands(tenant) and len(standing) < _MOST_STANDING:
            standing[tenant, asserted] = consent
        return consent

    def _offer(self, request: FinishedRequest) -> None:
        outbox = self._outbox
        try:
            consent = self._consent(request.tenant, request.request_id, request.asserted)
            if consent is None:
                return
            if len(self._threads) < _NUM_THREADS:
                self._start()
            held = hold(request, consent)
            if held is not None and outbox.hand_over(held, held.most_bytes):
                return
            if outbox.would_refuse(request.least_bytes):  # packing is for what has a place
                return
            value = pack(request, consent, self._target)
            key = request.conversation_id.encode()
        except (AttributeError, OverflowError, TypeError, ValueError):  # something of it is of another type
            outbox.refuse("invalid")
            return
        outbox.put(key, value)

    def _begin(self) -> None:
        self._outbox = Outbox(self._limits)
        self._starting = threading.Lock()

    def _start(self) -> None:
        with self._starting:
            lives = (
                ("capture-packer", Packer(self._outbox, self._target).run),
                ("capture-sender", Sender(self._outbox, self._open_log, self._topic, self._limits).run),
            )
            for name, life in lives[len(self._threads) :]:
                thread = threading.Thread(target=life, name=name, daemon=True)
                self._threads.append(
                    thread
                )  # before the start: a child forked meanwhile must not take itself for the first
                try:
                    thread.start()
                except RuntimeError:  # no thread to be had now: the next offer asks again
                    self._threads.remove(thread)
                    raise

    def _in_child(self) -> None:
        """Right after a fork, in the child: the queue is the parent's, and its lock may be held for ever."""
        self._begin()
        if self._threads:
            self._threads = []
            self._outbox.refuse_all("forked")


def _renew(reference: weakref.ref[CaptureHook]) -> None:
    hook = reference()  # the interpreter keeps its callbacks for ever: they must not keep hooks
    if hook is not None:
        hook._in_child()

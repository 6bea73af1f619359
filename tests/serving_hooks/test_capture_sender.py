"""The sender: whatever a log does, entries are delivered in the end, or counted under what kept them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from draftloop.pipeline.errors import (
    AccessDeniedError,
    AppendError,
    AuthenticationError,
    BrokerUnreachableError,
    MissingTopicError,
    RecordTooLargeError,
    StorageError,
    UnknownCaError,
)
from draftloop.pipeline.stream.log import LogEntry
from draftloop.serving_hooks.outbox import ENTRY_BYTES, CaptureLimits, Outbox, unpack
from draftloop.serving_hooks.sender import Sender

QUICK: dict[str, Any] = {"retry_first_s": 0.001, "retry_most_s": 0.002, "linger_s": 0.0}
KIB = bytes(1024)


class Script:
    """A log that plays acts, one an append: it raises an exception, calls a callable; when all are played it works."""

    def __init__(self, *acts: Exception | Callable[[Sequence[LogEntry]], None]) -> None:
        self.acts = list(acts)
        self.arrived: list[bytes] = []
        self.batches: list[list[bytes]] = []
        self.opened = 0
        self.closed = 0

    def __call__(self) -> Script:
        self.opened += 1
        return self

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        self.batches.append([entry.key for entry in entries])
        lost: set[int] = set()
        if self.acts:
            act = self.acts.pop(0)
            if isinstance(act, AppendError):
                lost = {*act.refused, *act.failed}
                self.arrived += [entry.key for index, entry in enumerate(entries) if index not in lost]
                raise act
            if isinstance(act, Exception):
                raise act
            act(entries)
        self.arrived += [entry.key for entry in entries]

    def close(self) -> None:
        self.closed += 1


@contextmanager
def sending(log: Script, **limits: Any) -> Iterator[Outbox]:
    chosen = CaptureLimits(**{**QUICK, **limits})
    outbox = Outbox(chosen)
    thread = threading.Thread(target=Sender(outbox, log, "t", chosen).run, daemon=True)
    thread.start()
    yield outbox
    outbox.close(5)
    thread.join(5)
    assert not thread.is_alive()
    assert_adds_up(outbox)


def assert_adds_up(outbox: Outbox) -> dict[str, int]:
    counters = outbox.counters()
    dropped = sum(count for name, count in counters.items() if name.startswith("dropped."))
    assert counters["offered"] == counters["delivered"] + dropped + counters["in_queue"]
    return counters


def put(outbox: Outbox, *names: str, value: bytes = b"v") -> None:
    for name in names:
        outbox.put(name.encode(), value)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_refused_entries_are_counted_failed_ones_sent_again_and_the_rest_has_arrived() -> None:
    log = Script(
        AppendError(
            "3 of 5",
            refused={1: RecordTooLargeError("5 MB")},
            failed={0: BrokerUnreachableError("gone"), 3: BrokerUnreachableError("gone")},
        )
    )
    with sending(log, linger_s=0.05) as outbox:
        put(outbox, "a", "b", "c", "d", "e")
        assert outbox.flush(5)
        assert log.batches == [[b"a", b"b", b"c", b"d", b"e"], [b"a", b"d"]]
        assert log.arrived == [b"c", b"e", b"a", b"d"]
        counters = assert_adds_up(outbox)
        assert (counters["delivered"], counters["dropped.too_large"], counters["send_errors"]) == (4, 1, 1)
        assert counters["queue_bytes"] == 0


def test_entries_that_are_only_refused_do_not_make_the_log_a_failing_one() -> None:
    log = Script(AppendError("1 of 1", refused={0: RecordTooLargeError("5 MB")}, failed={}))
    with sending(log) as outbox:
        put(outbox, "big")
        assert outbox.flush(5)
        assert outbox.counters()["send_errors"] == 0
        assert outbox.last_error is None
        assert (log.opened, log.closed) == (1, 0)


def test_a_failed_batch_keeps_its_place_before_what_came_later() -> None:
    log = Script()
    with sending(log, batch_records=2) as outbox:
        log.acts = [lambda _: put(outbox, "c", "d"), StorageError("x"), StorageError("x")]
        put(outbox, "a", "b")
        assert outbox.flush(5)
        assert log.arrived == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("failures", [1, 7, 40])
def test_an_outage_of_any_length_loses_nothing_and_the_log_is_opened_anew_after_each_failure(failures: int) -> None:
    log = Script(*[ConnectionError("down")] * failures)
    with sending(log) as outbox:
        put(outbox, "a", "b")
        assert outbox.flush(20)
        assert sorted(set(log.arrived)) == [b"a", b"b"]
        counters = outbox.counters()
        assert (counters["delivered"], counters["send_errors"]) == (2, failures)
        assert (log.opened, log.closed) == (failures + 1, failures)
        assert outbox.last_error is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BrokerUnreachableError("x"), "unreachable"),
        (AuthenticationError("x"), "authentication"),
        (AccessDeniedError("x"), "access_denied"),
        (UnknownCaError("x"), "tls"),
        (MissingTopicError("x"), "missing_topic"),
        (StorageError("x"), "log_error"),
        (ConnectionError("x"), "log_error"),
        (AppendError("x", refused={}, failed={0: AccessDeniedError("x")}), "access_denied"),
    ],
)
def test_what_is_too_old_after_a_failure_is_counted_under_it(error: Exception, reason: str) -> None:
    log = Script(*[error] * 10_000)
    with sending(log, retry_for_s=0.05) as outbox:
        put(outbox, "old")
        assert outbox.flush(5)
        counters = assert_adds_up(outbox)
        assert {name: count for name, count in counters.items() if name.startswith("dropped")} == {
            f"dropped.{reason}": 1
        }
        why = error.failed[0] if isinstance(error, AppendError) else error
        assert outbox.last_error == type(why).__name__
        log.acts.clear()
        put(outbox, "young")
        assert outbox.flush(5)
        assert log.arrived == [b"young"]
        assert outbox.last_error is None


def test_age_alone_drops_nothing_while_the_log_works() -> None:
    log = Script(lambda _: time.sleep(0.1))
    with sending(log, retry_for_s=0.01, batch_records=1) as outbox:
        put(outbox, "a", "b", "c")
        assert outbox.flush(5)
        assert log.arrived == [b"a", b"b", b"c"]


def test_a_batch_is_bounded_in_bytes_and_a_record_over_that_goes_alone() -> None:
    log = Script()
    outbox = Outbox(CaptureLimits(batch_bytes=3 * (1024 + 1 + ENTRY_BYTES), **QUICK))
    put(outbox, "a", "b", value=KIB)
    put(outbox, "c", value=8 * KIB)
    put(outbox, "d", "e", "f", "g", value=KIB)
    taken = []
    for _ in range(4):
        batch = outbox.take()
        taken.append([unpack(entry).key for entry in batch])
        outbox.settle(batch, {}, {})
    assert taken == [[b"a", b"b"], [b"c"], [b"d", b"e", b"f"], [b"g"]]
    assert log.batches == []


def test_a_batch_gathers_for_the_linger_and_flush_ends_it() -> None:
    log = Script()
    with sending(log, linger_s=30.0) as outbox:
        put(outbox, "a", "b")
        time.sleep(0.05)
        put(outbox, "c")
        assert log.batches == []
        assert outbox.flush(5)
        assert log.batches == [[b"a", b"b", b"c"]]


def test_a_full_batch_does_not_wait_for_the_linger() -> None:
    log = Script()
    with sending(log, linger_s=30.0, batch_records=3) as outbox:
        put(outbox, "a", "b", "c")
        wait_for(lambda: outbox.counters()["delivered"] == 3)
    with sending(log, linger_s=30.0, batch_bytes=2000) as outbox:
        put(outbox, "d", "e", value=KIB)
        wait_for(lambda: outbox.counters()["delivered"] == 1)


def test_close_is_bounded_while_an_append_hangs_and_its_late_answer_changes_nothing() -> None:
    gate, entered = threading.Event(), threading.Event()

    def hang(entries: Sequence[LogEntry]) -> None:
        entered.set()
        assert gate.wait(30)

    log = Script(hang)
    with sending(log, batch_records=2) as outbox:
        put(outbox, "a", "b", "c", "d", "e")
        assert entered.wait(5)
        started = time.monotonic()
        assert not outbox.close(0.2)
        assert time.monotonic() - started < 2
        counters = assert_adds_up(outbox)
        assert (counters["dropped.unknown_at_exit"], counters["dropped.closed"]) == (2, 3)
        assert (counters["in_queue"], counters["queue_bytes"], counters["delivered"]) == (0, 0, 0)
        put(outbox, "late")
        assert assert_adds_up(outbox)["dropped.closed"] == 4
        before = outbox.counters()
        gate.set()
        wait_for(lambda: log.closed == 1)
        assert outbox.counters() == before


def test_close_tries_once_more_at_once_and_ends_the_waiting_between_attempts() -> None:
    log = Script(StorageError("x"))
    with sending(log, retry_first_s=60.0, retry_most_s=60.0) as outbox:
        put(outbox, "a")
        wait_for(lambda: outbox.counters()["send_errors"] == 1)
        assert outbox.close(5)
        assert log.arrived == [b"a"]
    log = Script(*[StorageError("x")] * 100)
    with sending(log, retry_first_s=60.0, retry_most_s=60.0) as outbox:
        put(outbox, "a")
        wait_for(lambda: outbox.counters()["send_errors"] == 1)
        started = time.monotonic()
        assert not outbox.close(0.1)
        assert time.monotonic() - started < 2
        assert outbox.counters()["dropped.closed"] == 1


def test_the_back_off_doubles_to_its_limit_with_jitter() -> None:
    sender = Sender(Outbox(CaptureLimits()), Script(), "t", CaptureLimits(retry_first_s=0.1, retry_most_s=5.0))
    for failures, longest in ((1, 0.1), (2, 0.2), (6, 3.2), (7, 5.0), (5000, 5.0)):
        delays = {sender._delay(failures) for _ in range(50)}
        assert min(delays) >= longest / 2
        assert max(delays) <= longest
        assert len(delays) > 10


def test_a_log_that_cannot_be_closed_stops_nothing() -> None:
    class Stubborn(Script):
        def close(self) -> None:
            super().close()
            raise OSError("no")

    log = Stubborn(StorageError("x"))
    with sending(log) as outbox:
        put(outbox, "a")
        assert outbox.flush(5)
        assert log.arrived == [b"a"]


class Leaving(BaseException):
    """What a client must not raise, as SystemExit."""


@pytest.mark.parametrize(
    "nonsense",
    [
        Leaving(),
        SystemExit(1),
        AppendError("x", refused={7: StorageError("x")}, failed={9: StorageError("x")}),
        AppendError("x", refused={0: StorageError("x")}, failed={0: StorageError("x")}),
    ],
)
def test_a_client_that_breaks_its_contract_ends_neither_the_sender_nor_the_account(nonsense: BaseException) -> None:
    class Odd(Script):
        def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
            if not self.batches:
                self.batches.append([])
                raise nonsense
            super().append(topic, entries)

    log = Odd()
    with sending(log) as outbox:
        put(outbox, "a")
        assert outbox.flush(5)
        put(outbox, "b")
        assert outbox.flush(5)
        assert log.arrived[-1] == b"b"

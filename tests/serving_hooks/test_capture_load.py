"""What a calling thread sees of the hook while its log hangs, fails or works: the issue's limits without a broker."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from draftloop.pipeline.errors import AppendError, RecordTooLargeError, StorageError
from draftloop.pipeline.records import decode, unpack_ids
from draftloop.pipeline.stream.load import POLICY, LoadPlan, Witness, drive
from draftloop.pipeline.stream.log import LogEntry
from draftloop.serving_hooks.capture import CaptureHook, CaptureLimits

PLAN = LoadPlan(rate=500, seconds=2.0, close_s=0.2)


class Kept:
    def __init__(self) -> None:
        self.entries: list[LogEntry] = []

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        self.entries += entries

    def close(self) -> None:
        pass


class Failing(Kept):
    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        raise StorageError("down")


class Hanging(Kept):
    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        threading.Event().wait(10)


def hook_on(log: Any) -> CaptureHook:
    return CaptureHook(lambda: log, topic="t", policy=POLICY, target="t", limits=CaptureLimits(retry_first_s=0.01))


@pytest.fixture
def small_heap() -> Iterator[None]:
    """A full collection of pytest's and torch's objects takes longer than an offer may: they are not the hook's."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


ATTEMPTS = 4  # a thread of ours that loses its core to another program may hold what an offer needs


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("kind", [Kept, Failing, Hanging])
def test_an_offer_takes_twenty_microseconds_whatever_the_log_does(kind: type[Kept]) -> None:
    seen = []
    for _ in range(ATTEMPTS):
        result = drive(hook_on(kind()), PLAN)
        assert (result.offered, result.counters["offered"]) == (1000, 1000)
        assert 0 < result.own_ms.p50 <= result.offer_ms.p50 <= result.offer_ms.p99 <= result.offer_ms.p999
        assert result.closed_clean == (kind is Kept)
        own = result.own_ms
        if own.p50 <= 0.020 and own.p99 <= 1.0 and own.max <= 20.0:
            return
        seen.append(own)
    raise AssertionError(f"p50 over 0.02, p99 over 1 or max over 20 ms each time: {seen}")


@pytest.mark.usefixtures("small_heap")
def test_a_prompt_of_128k_tokens_is_within_the_bound_too() -> None:
    log = Kept()
    result = drive(hook_on(log), LoadPlan(rate=20, seconds=2.0, num_ids=131_072))
    assert result.counters["delivered"] == 40
    assert result.own_ms.max <= 20.0
    record = decode(log.entries[0].value)
    assert len(unpack_ids(record.prompt_ids)) + len(unpack_ids(record.output_ids)) == 131_072


def test_the_load_is_what_it_says_four_kilobytes_and_goes_on_while_told_to() -> None:
    log = Kept()
    answers = iter([True, True, False])
    result = drive(hook_on(log), LoadPlan(rate=2000, seconds=0.1), more=lambda: next(answers))
    assert result.offered == result.counters["delivered"] == len(log.entries)
    assert result.offered == 400
    assert {4096 <= len(entry.value) < 4500 for entry in log.entries} == {True}
    assert len({entry.key for entry in log.entries}) == len(log.entries)
    assert result.rss_peak_mb >= result.rss_before_mb > 1


def test_a_witness_notes_exactly_what_was_acknowledged() -> None:
    class Partial(Kept):
        def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
            if len(entries) == 3:
                raise AppendError("x", refused={0: RecordTooLargeError("x")}, failed={2: StorageError("x")})

    keys: list[bytes] = []
    witness = Witness(Partial(), keys)
    with pytest.raises(AppendError):
        witness.append("t", [LogEntry(key, b"") for key in (b"a", b"b", b"c")])
    assert keys == [b"b"]
    witness.append("t", [LogEntry(b"c", b"")])
    assert keys == [b"b", b"c"]
    with pytest.raises(StorageError):
        Witness(Failing(), keys).append("t", [LogEntry(b"d", b"")])
    assert keys == [b"b", b"c"]

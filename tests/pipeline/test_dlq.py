"""Poison records: each copied once, with its reason and place, however often the copying is cut off and begun again."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import msgspec
import pytest

from draftloop.pipeline.data.curate import Window
from draftloop.pipeline.data.dlq import DeadLetter, _Places, dead_letter, poison, read_dead_letters
from draftloop.pipeline.data.snapshot import Reject
from draftloop.pipeline.errors import (
    AppendError,
    MissingTopicError,
    RecordTooLargeError,
    StorageError,
    UndecodableRecordError,
)
from draftloop.pipeline.stream.log import LogEntry, MemoryLog

RAW = "draftloop.raw.tiny"
DLQ = "draftloop.dlq.tiny"
WINDOW = Window(RAW, {0: 2}, {0: 10})
REJECTS = [
    Reject("aborted", 0, 2, "r-2"),
    Reject("undecodable", 0, 3, None),
    Reject("newer_schema", 0, 5, None),
    Reject("missing", 0, 6, None),
    Reject("undecodable", 0, 9, "r-9"),
]


def raw_log(log: MemoryLog | None = None, *, num_entries: int = 12) -> MemoryLog:
    log = log or MemoryLog()
    log.create_topic(RAW, num_partitions=1)
    log._ids[RAW] = "t1"
    log.create_topic(DLQ, num_partitions=2)
    log.append(RAW, [LogEntry(b"k%d" % index, b"v%d" % index) for index in range(num_entries)])
    return log


def letter(offset: int, reason: str, value: bytes | None) -> DeadLetter:
    return DeadLetter(
        reason=reason,
        topic=RAW,
        topic_id="t1",
        partition=0,
        offset=offset,
        time_ms=offset + 1,
        key=b"k%d" % offset,
        value=value,
    )


LETTERS = [letter(3, "undecodable", b"v3"), letter(5, "newer_schema", b"v5"), letter(9, "undecodable", b"v9")]


def there(log: MemoryLog) -> list[DeadLetter]:
    return sorted(read_dead_letters(log, DLQ), key=lambda one: one.offset)


def test_only_what_cannot_be_read_is_poison_and_it_keeps_its_reason() -> None:
    assert list(poison(raw_log(), REJECTS, WINDOW)) == LETTERS


def test_a_dead_letter_is_the_whole_entry_under_the_key_of_its_place() -> None:
    log = raw_log()
    assert dead_letter(log, REJECTS, WINDOW, to=DLQ) == 3
    entries = [entry for number in (0, 1) for entry in log.read(DLQ, number, 0, 9)]
    assert {entry.key for entry in entries} == {f"{RAW}/0/{offset}".encode() for offset in (3, 5, 9)}
    assert {msgspec.msgpack.decode(entry.value)["offset"]: msgspec.msgpack.decode(entry.value) for entry in entries}[
        5
    ] == {
        "reason": "newer_schema",
        "topic": RAW,
        "topic_id": "t1",
        "partition": 0,
        "offset": 5,
        "time_ms": 6,
        "key": b"k5",
        "value": b"v5",
    }


def test_a_second_copying_adds_nothing() -> None:
    log = raw_log()
    assert [dead_letter(log, REJECTS, WINDOW, to=DLQ) for _ in range(3)] == [3, 0, 0]
    assert there(log) == LETTERS


def test_a_copying_that_was_cut_off_is_completed() -> None:
    log = raw_log()
    assert dead_letter(log, REJECTS[3:], WINDOW, to=DLQ) == 1  # the last one arrived, the first ones did not
    assert dead_letter(log, REJECTS, WINDOW, to=DLQ) == 2
    assert there(log) == LETTERS


def test_letters_of_other_windows_and_topics_do_not_count_as_there() -> None:
    log = raw_log()
    log.create_topic("draftloop.raw.other", num_partitions=1)
    log.append("draftloop.raw.other", [LogEntry(b"", b"o%d" % index) for index in range(12)])
    other = Window("draftloop.raw.other", {0: 0}, {0: 12})
    earlier = Window(RAW, {0: 0}, {0: 2})
    assert dead_letter(log, [Reject("undecodable", 0, 3, None)], other, to=DLQ) == 1
    assert dead_letter(log, [Reject("undecodable", 0, 1, None)], earlier, to=DLQ) == 1
    assert dead_letter(log, REJECTS, WINDOW, to=DLQ) == 3


def test_letters_of_a_topic_that_was_made_anew_do_not_count_as_there() -> None:
    log = raw_log()
    assert dead_letter(log, REJECTS, WINDOW, to=DLQ) == 3
    log._ids[RAW] = "t2"
    assert [dead_letter(log, REJECTS, WINDOW, to=DLQ) for _ in range(2)] == [3, 0]
    assert [one.topic_id for one in read_dead_letters(log, DLQ)].count("t2") == 3


def test_what_expired_since_is_left_out() -> None:
    rejects = [Reject("undecodable", 0, 11, None), Reject("undecodable", 0, 40, None)]
    assert [one.offset for one in poison(raw_log(), rejects, Window(RAW, {}, {0: 50}))] == [11]


def test_many_poison_records_far_apart_are_all_copied() -> None:
    log = raw_log(num_entries=3000)
    offsets = [*range(0, 900, 2), 1500, 2999]
    rejects = [Reject("undecodable", 0, offset, None) for offset in offsets]
    window = Window(RAW, {}, {0: 3000})
    assert dead_letter(log, rejects, window, to=DLQ) == len(offsets)
    assert [one.offset for one in there(log)] == offsets


def test_neither_a_long_gap_nor_many_letters_take_much_memory() -> None:
    places = _Places(Window(RAW, {0: 5}, {0: 2**60}))
    tracemalloc.start()
    for offset in (4, 5, 4095, 4096, 2**60 - 1, 2**60, *range(10_000, 300_000)):
        places.add(0, offset)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 200_000
    marked = [4, 5, 6, 4095, 4096, 4097, 9_999, 10_000, 299_999, 300_000, 2**60 - 1, 2**60]
    found = [offset for offset in marked if letter(offset, "undecodable", None) in places]
    assert found == [5, 4095, 4096, 10_000, 299_999, 2**60 - 1]


def test_a_window_without_poison_does_not_touch_the_topic() -> None:
    log = MemoryLog()
    log.create_topic(RAW, num_partitions=1)
    assert dead_letter(log, [Reject("aborted", 0, 2, "r-2")], WINDOW, to=DLQ) == 0


def test_a_missing_dead_letter_topic_is_told_as_such() -> None:
    log = MemoryLog()
    log.create_topic(RAW, num_partitions=1)
    log.append(RAW, [LogEntry(b"", b"x")] * 10)
    with pytest.raises(MissingTopicError, match=DLQ):
        dead_letter(log, REJECTS, WINDOW, to=DLQ)


class Narrow(MemoryLog):
    """A log whose dead-letter topic takes values of up to `limit` bytes, or fails for a while."""

    limit = 200
    failing = False

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        if topic != DLQ:
            return super().append(topic, entries)
        large = {index for index, entry in enumerate(entries) if len(entry.value) > self.limit}
        failed = {0: StorageError("no broker")} if self.failing else {}
        taken = [entry for index, entry in enumerate(entries) if index not in large and index not in failed]
        super().append(topic, taken)
        if large or failed:
            refused = {index: RecordTooLargeError("too large") for index in large - failed.keys()}
            raise AppendError("some did not arrive", refused=refused, failed=failed)
        return None


def test_a_poison_record_too_large_for_the_topic_is_noted_without_its_value() -> None:
    log = Narrow()
    log.limit = len(msgspec.msgpack.encode(LETTERS[0]))
    raw_log(log)
    assert dead_letter(log, REJECTS, WINDOW, to=DLQ) == 3
    assert there(log) == [LETTERS[0], letter(5, "newer_schema", None), LETTERS[2]]
    assert dead_letter(log, REJECTS, WINDOW, to=DLQ) == 0


def test_a_key_too_large_for_the_topic_is_cut_short() -> None:
    log = raw_log(Narrow())
    log.append(RAW, [LogEntry(b"K" * 900, b"")])
    window = Window(RAW, {0: 0}, {0: 13})
    assert dead_letter(log, [Reject("undecodable", 0, 12, None)], window, to=DLQ) == 1
    (found,) = there(log)
    assert (found.key, found.value, found.offset) == (b"K" * 64, None, 12)
    assert dead_letter(log, [Reject("undecodable", 0, 12, None)], window, to=DLQ) == 0


def test_letters_that_did_not_arrive_are_an_error_and_are_sent_the_next_time() -> None:
    log = Narrow()
    raw_log(log)
    log.failing = True
    with pytest.raises(StorageError, match=r"1 of 3 dead letters did not reach 'draftloop\.dlq\.tiny': no broker") as e:
        dead_letter(log, REJECTS, WINDOW, to=DLQ)
    assert e.value.mend is not None
    log.failing = False
    assert dead_letter(log, REJECTS, WINDOW, to=DLQ) == 1
    assert there(log) == LETTERS


def test_a_foreign_entry_in_the_topic_stops_no_copying_and_is_told_by_its_place_to_readers() -> None:
    log = raw_log()
    names = [
        "a",
        f"{RAW}/0/x",
        f"{RAW}/7/3",
        f"{RAW}/0/999",
        f"{RAW}/0/{'9' * 5000}",
        f"{RAW}/{'1' * 5000}/3",
        f"{RAW}/0/",
    ]
    foreign = [name.encode() for name in names] + [f"{RAW}/0/".encode() + "³".encode(), b"", b"//"]
    log.append(DLQ, [LogEntry(key, b"not a letter") for key in foreign])
    named = letter(3, "undecodable", b"v3").name
    log.append(DLQ, [LogEntry(named, b"not a letter"), LogEntry(named, b"")])
    assert dead_letter(log, REJECTS, WINDOW, to=DLQ) == 3
    with pytest.raises(UndecodableRecordError, match=rf"{DLQ} partition \d offset 0 is not a dead letter"):
        list(read_dead_letters(log, DLQ))

"""What every capture log promises. A new log joins by one more name in `LOGS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.pipeline.errors import InputError
from draftloop.pipeline.stream.log import CaptureLog, LogEntry, MemoryLog, StoredEntry, partition_of
from draftloop.pipeline.stream.sqlite_log import SqliteLog

TOPIC = "draftloop.raw.tiny"
LOGS: dict[str, Callable[[Path], CaptureLog]] = {
    "memory": lambda folder: MemoryLog(),
    "sqlite": lambda folder: SqliteLog(folder / "log.sqlite"),
}
UNKNOWN = "no topic 'nowhere' in the log \\(it has: draftloop.raw.tiny\\)"


@pytest.fixture(params=LOGS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CaptureLog]:
    opened = LOGS[request.param](tmp_path)
    opened.create_topic(TOPIC, num_partitions=3)
    yield opened
    opened.close()


def everything(log: CaptureLog, topic: str = TOPIC) -> list[StoredEntry]:
    ends = log.end_offsets(topic)
    return [entry for partition, end in ends.items() for entry in log.read(topic, partition, 0, end)]


def test_a_new_topic_is_listed_with_its_partitions_and_starts_at_zero(log: CaptureLog) -> None:
    assert log.topics() == {TOPIC: 3}
    assert log.end_offsets(TOPIC) == {0: 0, 1: 0, 2: 0}
    assert everything(log) == []


def test_creating_the_same_topic_again_keeps_its_entries(log: CaptureLog) -> None:
    log.append(TOPIC, [LogEntry(b"k", b"v")])
    log.create_topic(TOPIC, num_partitions=3)
    assert [entry.value for entry in everything(log)] == [b"v"]


def test_another_partition_count_is_refused(log: CaptureLog) -> None:
    with pytest.raises(InputError, match="has 3 partitions, not 4"):
        log.create_topic(TOPIC, num_partitions=4)
    assert log.topics() == {TOPIC: 3}


def test_an_unknown_topic_is_named_together_with_the_known_ones(log: CaptureLog) -> None:
    with pytest.raises(InputError, match=UNKNOWN):
        log.append("nowhere", [LogEntry(b"k", b"v")])
    with pytest.raises(InputError, match=UNKNOWN):
        log.end_offsets("nowhere")
    with pytest.raises(InputError, match=UNKNOWN):
        list(log.read("nowhere", 0, 0, 1))
    with pytest.raises(InputError, match=UNKNOWN):
        log.committed("curator", "nowhere")
    with pytest.raises(InputError, match=UNKNOWN):
        log.commit("curator", "nowhere", {0: 1})


def test_equal_keys_share_a_partition_and_keep_their_order(log: CaptureLog) -> None:
    for turn in range(40):
        log.append(TOPIC, [LogEntry(f"conversation-{turn % 5}".encode(), f"{turn}".encode())])
    for conversation in range(5):
        key = f"conversation-{conversation}".encode()
        found = [entry for entry in everything(log) if entry.key == key]
        assert {entry.partition for entry in found} == {partition_of(key, 3)}
        assert [int(entry.value) for entry in found] == list(range(conversation, 40, 5))


def test_offsets_are_dense_from_zero_in_every_partition(log: CaptureLog) -> None:
    entries = [LogEntry(f"key-{index}".encode(), b"") for index in range(50)]
    for start, stop in ((0, 7), (7, 8), (8, 50)):
        log.append(TOPIC, entries[start:stop])
    ends = log.end_offsets(TOPIC)
    assert sum(ends.values()) == 50
    for partition, end in ends.items():
        assert [entry.offset for entry in log.read(TOPIC, partition, 0, end)] == list(range(end))


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 0, []), (0, 3, [0, 1, 2]), (2, 5, [2, 3, 4]), (598, 700, [598, 599]), (600, 601, []), (4, 2, [])],
)
def test_a_window_is_half_open_and_ends_where_the_log_ends(
    log: CaptureLog, start: int, stop: int, expected: list[int]
) -> None:
    log.append(TOPIC, [LogEntry(b"k", f"{index}".encode()) for index in range(600)])
    found = list(log.read(TOPIC, partition_of(b"k", 3), start, stop))
    assert [entry.offset for entry in found] == expected
    assert [int(entry.value) for entry in found] == expected


def test_a_window_over_many_pages_is_complete(log: CaptureLog) -> None:
    log.append(TOPIC, [LogEntry(b"k", f"{index}".encode()) for index in range(1000)])
    found = list(log.read(TOPIC, partition_of(b"k", 3), 1, 999))
    assert [int(entry.value) for entry in found] == list(range(1, 999))


def test_a_reader_may_be_left_open_while_entries_are_appended(log: CaptureLog) -> None:
    log.append(TOPIC, [LogEntry(b"k", b"first"), LogEntry(b"k", b"second")])
    reader = log.read(TOPIC, partition_of(b"k", 3), 0, 2)
    assert next(reader).value == b"first"
    log.append(TOPIC, [LogEntry(b"k", b"third")])
    assert [entry.value for entry in reader] == [b"second"]


def test_an_empty_append_changes_nothing(log: CaptureLog) -> None:
    log.append(TOPIC, [])
    assert log.end_offsets(TOPIC) == {0: 0, 1: 0, 2: 0}


def test_topics_do_not_see_each_other(log: CaptureLog) -> None:
    log.create_topic("other", num_partitions=1)
    log.append("other", [LogEntry(b"k", b"there")])
    log.append(TOPIC, [LogEntry(b"k", b"here")])
    assert [entry.value for entry in everything(log)] == [b"here"]
    assert [entry.value for entry in everything(log, "other")] == [b"there"]
    assert log.topics() == {TOPIC: 3, "other": 1}


def test_commits_are_per_group_and_per_topic_and_merge(log: CaptureLog) -> None:
    log.create_topic("other", num_partitions=1)
    assert log.committed("curator", TOPIC) == {0: 0, 1: 0, 2: 0}
    log.commit("curator", TOPIC, {0: 5, 2: 7})
    log.commit("curator", TOPIC, {2: 9})
    log.commit("auditor", TOPIC, {1: 1})
    assert log.committed("curator", TOPIC) == {0: 5, 1: 0, 2: 9}
    assert log.committed("auditor", TOPIC) == {0: 0, 1: 1, 2: 0}
    assert log.committed("curator", "other") == {0: 0}


def test_a_refused_append_leaves_nothing(log: CaptureLog) -> None:
    with pytest.raises(InputError):
        log.append("nowhere", [LogEntry(b"k", b"v")])
    assert log.topics() == {TOPIC: 3}
    assert everything(log) == []


def test_times_do_not_run_backwards_within_a_partition(log: CaptureLog) -> None:
    for index in range(5):
        log.append(TOPIC, [LogEntry(b"k", f"{index}".encode())])
    times = [entry.time_ms for entry in everything(log)]
    assert times == sorted(times)
    assert times[0] > 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=300)), max_size=12))
def test_bytes_come_back_exactly(log: CaptureLog, batch: list[tuple[bytes, bytes]]) -> None:
    before = log.end_offsets(TOPIC)
    log.append(TOPIC, [LogEntry(*pair) for pair in batch])
    after = log.end_offsets(TOPIC)
    found = [
        (entry.key, entry.value)
        for partition in before
        for entry in log.read(TOPIC, partition, before[partition], after[partition])
    ]
    expected = [pair for partition in before for pair in batch if partition_of(pair[0], 3) == partition]
    assert found == expected

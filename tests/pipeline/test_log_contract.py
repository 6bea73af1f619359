"""What every capture log promises. A new log joins by one more name in `LOGS`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.pipeline.errors import InputError, MissingTopicError
from draftloop.pipeline.stream.log import CaptureLog, LogEntry, MemoryLog, StoredEntry, partition_of
from draftloop.pipeline.stream.sqlite_log import SqliteLog


class Place(NamedTuple):
    """A log and names of this test's own: one Kafka serves all tests."""

    log: CaptureLog
    prefix: str
    topic: str  # with three partitions

    @property
    def other(self) -> str:
        return f"{self.prefix}other"

    @property
    def nowhere(self) -> str:
        return f"{self.prefix}nowhere"

    @property
    def curator(self) -> str:
        return f"{self.prefix}curator"

    @property
    def auditor(self) -> str:
        return f"{self.prefix}auditor"


def kafka_log(request: pytest.FixtureRequest, prefix: str) -> CaptureLog:
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    return KafkaLog(request.getfixturevalue("admin").model_copy(update={"topic_prefix": prefix}))


def memory_log(request: pytest.FixtureRequest, prefix: str) -> CaptureLog:
    return MemoryLog()


def sqlite_log(request: pytest.FixtureRequest, prefix: str) -> CaptureLog:
    folder: Path = request.getfixturevalue("tmp_path")
    return SqliteLog(folder / "log.sqlite")


LOGS: dict[str, Callable[[pytest.FixtureRequest, str], CaptureLog]] = {
    "memory": memory_log,
    "sqlite": sqlite_log,
    "kafka": kafka_log,
}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.broker] if name == "kafka" else []) for name in LOGS])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    prefix = f"contract.{uuid.uuid4().hex[:8]}."
    opened = LOGS[request.param](request, prefix)
    found = Place(opened, prefix, f"{prefix}raw.tiny")
    opened.create_topic(found.topic, num_partitions=3)
    yield found
    opened.close()


def everything(log: CaptureLog, topic: str) -> list[StoredEntry]:
    ends = log.end_offsets(topic)
    return [entry for partition, end in ends.items() for entry in log.read(topic, partition, 0, end)]


def test_a_new_topic_is_listed_with_its_partitions_and_starts_at_zero(place: Place) -> None:
    log, topic = place.log, place.topic
    assert log.topics() == {topic: 3}
    assert log.start_offsets(topic) == {0: 0, 1: 0, 2: 0}
    assert log.end_offsets(topic) == {0: 0, 1: 0, 2: 0}
    assert everything(log, topic) == []


def test_the_start_stays_where_it_is_while_entries_are_appended(place: Place) -> None:
    log, topic = place.log, place.topic
    log.append(topic, [LogEntry(b"k", b"1"), LogEntry(b"k", b"2")])
    assert log.start_offsets(topic) == {0: 0, 1: 0, 2: 0}


def test_a_topic_has_an_identity_of_its_own_that_stays(place: Place) -> None:
    log, topic = place.log, place.topic
    log.create_topic(place.other, num_partitions=3)
    first = log.topic_id(topic)
    assert first != log.topic_id(place.other)
    log.append(topic, [LogEntry(b"k", b"v")])
    log.commit(place.curator, topic, {0: 1})
    log.create_topic(topic, num_partitions=3)
    assert log.topic_id(topic) == first
    with pytest.raises(MissingTopicError, match=f"no topic '{place.nowhere}'"):
        log.topic_id(place.nowhere)


def test_a_topic_made_anew_has_another_identity(place: Place, request: pytest.FixtureRequest) -> None:
    log, topic = place.log, place.topic
    first = log.topic_id(topic)
    if isinstance(log, MemoryLog | SqliteLog):  # their topics go with the whole log only
        log.close()
        for file in request.getfixturevalue("tmp_path").glob("log.sqlite*"):
            file.unlink()
        anew = memory_log(request, "") if isinstance(log, MemoryLog) else sqlite_log(request, "")
    else:
        anew = log
        delete_topic(request, topic)
    anew.create_topic(topic, num_partitions=3)
    second = anew.topic_id(topic)
    anew.close()
    assert second != first


def delete_topic(request: pytest.FixtureRequest, topic: str) -> None:
    from kafka import KafkaAdminClient

    from draftloop.pipeline.stream.kafka_connect import client_options

    admin = KafkaAdminClient(**client_options(request.getfixturevalue("admin")))
    try:
        admin.delete_topics([topic])
        deadline = time.monotonic() + 20
        while topic in admin.list_topics() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        admin.close()


def test_creating_the_same_topic_again_keeps_its_entries(place: Place) -> None:
    log, topic = place.log, place.topic
    log.append(topic, [LogEntry(b"k", b"v")])
    log.create_topic(topic, num_partitions=3)
    assert [entry.value for entry in everything(log, topic)] == [b"v"]


def test_another_partition_count_is_refused(place: Place) -> None:
    with pytest.raises(InputError, match="has 3 partitions, not 4"):
        place.log.create_topic(place.topic, num_partitions=4)
    assert place.log.topics() == {place.topic: 3}


def test_a_topic_without_a_partition_is_refused(place: Place) -> None:
    with pytest.raises(InputError, match="with 0 partitions"):
        place.log.create_topic(place.other, num_partitions=0)
    assert place.log.topics() == {place.topic: 3}


def test_an_unknown_topic_is_named_together_with_the_known_ones(place: Place) -> None:
    log, nowhere = place.log, place.nowhere
    told = rf"no topic '{nowhere}' in the log \(it has: {place.topic}\)"
    with pytest.raises(MissingTopicError, match=told):
        log.append(nowhere, [LogEntry(b"k", b"v")])
    with pytest.raises(MissingTopicError, match=told):
        log.start_offsets(nowhere)
    with pytest.raises(MissingTopicError, match=told):
        log.end_offsets(nowhere)
    with pytest.raises(MissingTopicError, match=told):
        list(log.read(nowhere, 0, 0, 1))
    with pytest.raises(MissingTopicError, match=told):
        log.committed(place.curator, nowhere)
    with pytest.raises(MissingTopicError, match=told):
        log.commit(place.curator, nowhere, {0: 1})


def test_equal_keys_share_a_partition_and_keep_their_order(place: Place) -> None:
    log, topic = place.log, place.topic
    for turn in range(40):
        log.append(topic, [LogEntry(f"conversation-{turn % 5}".encode(), f"{turn}".encode())])
    for conversation in range(5):
        key = f"conversation-{conversation}".encode()
        found = [entry for entry in everything(log, topic) if entry.key == key]
        assert {entry.partition for entry in found} == {partition_of(key, 3)}
        assert [int(entry.value) for entry in found] == list(range(conversation, 40, 5))


def test_offsets_are_dense_from_zero_in_every_partition(place: Place) -> None:
    log, topic = place.log, place.topic
    entries = [LogEntry(f"key-{index}".encode(), b"") for index in range(50)]
    for start, stop in ((0, 7), (7, 8), (8, 50)):
        log.append(topic, entries[start:stop])
    ends = log.end_offsets(topic)
    assert sum(ends.values()) == 50
    for partition, end in ends.items():
        assert [entry.offset for entry in log.read(topic, partition, 0, end)] == list(range(end))


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 0, []), (0, 3, [0, 1, 2]), (2, 5, [2, 3, 4]), (598, 700, [598, 599]), (600, 601, []), (4, 2, [])],
)
def test_a_window_is_half_open_and_ends_where_the_log_ends(
    place: Place, start: int, stop: int, expected: list[int]
) -> None:
    log, topic = place.log, place.topic
    log.append(topic, [LogEntry(b"k", f"{index}".encode()) for index in range(600)])
    found = list(log.read(topic, partition_of(b"k", 3), start, stop))
    assert [entry.offset for entry in found] == expected
    assert [int(entry.value) for entry in found] == expected


def test_a_window_over_many_pages_is_complete(place: Place) -> None:
    log, topic = place.log, place.topic
    log.append(topic, [LogEntry(b"k", f"{index}".encode()) for index in range(1000)])
    found = list(log.read(topic, partition_of(b"k", 3), 1, 999))
    assert [int(entry.value) for entry in found] == list(range(1, 999))


def test_a_window_read_again_is_the_same(place: Place) -> None:
    log, topic = place.log, place.topic
    log.append(topic, [LogEntry(f"key-{index}".encode(), f"{index}".encode()) for index in range(100)])
    first = everything(log, topic)
    log.append(topic, [LogEntry(b"later", b"")])
    assert [entry for entry in everything(log, topic) if entry.key != b"later"] == first


def test_a_reader_may_be_left_open_while_entries_are_appended(place: Place) -> None:
    log, topic = place.log, place.topic
    log.append(topic, [LogEntry(b"k", b"first"), LogEntry(b"k", b"second")])
    reader = log.read(topic, partition_of(b"k", 3), 0, 2)
    assert next(reader).value == b"first"
    log.append(topic, [LogEntry(b"k", b"third")])
    assert [entry.value for entry in reader] == [b"second"]


def test_readers_side_by_side_do_not_disturb_each_other(place: Place) -> None:
    log, topic = place.log, place.topic
    log.append(topic, [LogEntry(f"key-{index}".encode(), f"{index}".encode()) for index in range(300)])
    ends = log.end_offsets(topic)
    readers = [log.read(topic, partition, skipped, end) for partition, end in ends.items() for skipped in (0, 7)]
    found: list[list[int]] = [[] for _ in readers]
    while any(len(each) < 60 for each in found):
        for each, reader in zip(found, readers, strict=True):
            each += [entry.offset for entry in [next(reader)]]
    for index, (partition, end) in enumerate(ends.items()):
        assert found[2 * index] == list(range(60))
        assert [entry.offset for entry in readers[2 * index]] == list(range(60, end))
        assert found[2 * index + 1] == list(range(7, 67))
        assert partition == index


def test_a_reader_left_behind_does_not_spoil_the_next_one(place: Place) -> None:
    log, topic = place.log, place.topic
    log.append(topic, [LogEntry(b"k", f"{index}".encode()) for index in range(600)])
    partition = partition_of(b"k", 3)
    for start in (0, 100, 5):
        left = log.read(topic, partition, start, 600)
        assert next(left).offset == start
        del left
        assert [entry.offset for entry in log.read(topic, partition, 3, 590)] == list(range(3, 590))


def test_an_empty_append_changes_nothing(place: Place) -> None:
    place.log.append(place.topic, [])
    assert place.log.end_offsets(place.topic) == {0: 0, 1: 0, 2: 0}


def test_topics_do_not_see_each_other(place: Place) -> None:
    log, topic, other = place.log, place.topic, place.other
    log.create_topic(other, num_partitions=1)
    log.append(other, [LogEntry(b"k", b"there")])
    log.append(topic, [LogEntry(b"k", b"here")])
    assert [entry.value for entry in everything(log, topic)] == [b"here"]
    assert [entry.value for entry in everything(log, other)] == [b"there"]
    assert log.topics() == {topic: 3, other: 1}


def test_commits_are_per_group_and_per_topic_and_merge(place: Place) -> None:
    log, topic, other = place.log, place.topic, place.other
    log.create_topic(other, num_partitions=1)
    log.append(topic, [LogEntry(f"key-{index}".encode(), b"") for index in range(60)])
    assert log.committed(place.curator, topic) == {0: 0, 1: 0, 2: 0}
    log.commit(place.curator, topic, {0: 5, 2: 7})
    log.commit(place.curator, topic, {2: 9})
    log.commit(place.auditor, topic, {1: 1})
    log.commit(place.curator, topic, {})
    assert log.committed(place.curator, topic) == {0: 5, 1: 0, 2: 9}
    assert log.committed(place.auditor, topic) == {0: 0, 1: 1, 2: 0}
    assert log.committed(place.curator, other) == {0: 0}


def test_a_refused_append_leaves_nothing(place: Place) -> None:
    with pytest.raises(InputError):
        place.log.append(place.nowhere, [LogEntry(b"k", b"v")])
    assert place.log.topics() == {place.topic: 3}
    assert everything(place.log, place.topic) == []


def test_times_do_not_run_backwards_within_a_partition(place: Place) -> None:
    for index in range(5):
        place.log.append(place.topic, [LogEntry(b"k", f"{index}".encode())])
    times = [entry.time_ms for entry in everything(place.log, place.topic)]
    assert times == sorted(times)
    assert times[0] > 0


def test_a_second_close_does_nothing(place: Place) -> None:
    place.log.close()
    place.log.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=300)), max_size=12))
def test_bytes_come_back_exactly(place: Place, batch: list[tuple[bytes, bytes]]) -> None:
    log, topic = place.log, place.topic
    before = log.end_offsets(topic)
    log.append(topic, [LogEntry(*pair) for pair in batch])
    after = log.end_offsets(topic)
    found = [
        (entry.key, entry.value)
        for partition in before
        for entry in log.read(topic, partition, before[partition], after[partition])
    ]
    expected = [pair for partition in before for pair in batch if partition_of(pair[0], 3) == partition]
    assert found == expected

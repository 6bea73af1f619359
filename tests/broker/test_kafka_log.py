"""KafkaLog beyond the contract of every log: gaps, limits, outages, commits without membership, nothing left behind."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftloop.pipeline.data.curate import pending_window
from draftloop.pipeline.errors import (
    AppendError,
    BrokerError,
    BrokerUnreachableError,
    InputError,
    MissingTopicError,
    RecordTooLargeError,
)
from draftloop.pipeline.stream.kafka_admin import KafkaAdmin
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity
from draftloop.pipeline.stream.kafka_log import CHUNK_BYTES, KafkaLog
from draftloop.pipeline.stream.log import LogEntry, StoredEntry, partition_of

Tool = Callable[[type], Any]


@pytest.fixture
def prefix() -> str:
    return f"klog.{uuid.uuid4().hex[:8]}."


@pytest.fixture
def topic(prefix: str) -> str:
    return f"{prefix}raw"


@pytest.fixture
def log(admin: KafkaConfig, prefix: str) -> Iterator[KafkaLog]:
    opened = KafkaLog(admin.model_copy(update={"topic_prefix": prefix}))
    yield opened
    opened.close()


@pytest.fixture
def tool(admin: KafkaConfig) -> Iterator[Tool]:
    """kafka-python's own clients, for what the log cannot do to itself."""
    from draftloop.pipeline.stream.kafka_connect import client_options

    made: list[Any] = []

    def make(kind: type, **options: Any) -> Any:
        made.append(kind(**client_options(admin), **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


def read_all(log: KafkaLog, topic: str, *, start: int = 0) -> list[StoredEntry]:
    return [entry for number, end in log.end_offsets(topic).items() for entry in log.read(topic, number, start, end)]


def values(log: KafkaLog, topic: str) -> list[bytes]:
    return [entry.value for entry in read_all(log, topic)]


def test_the_constructor_neither_connects_nor_waits(tmp_path: Path) -> None:
    security = KafkaSecurity(username="x", password_file=tmp_path / "none", ca_file=tmp_path / "none.pem")
    before = time.monotonic()
    KafkaLog(KafkaConfig(bootstrap=("127.0.0.1:1",), security=security)).close()
    assert time.monotonic() - before < 0.1


def test_only_topics_under_the_prefix_are_listed_and_never_kafkas_own(log: KafkaLog, topic: str, tool: Tool) -> None:
    from kafka import KafkaAdminClient

    log.create_topic(topic, num_partitions=2)
    log.create_topic("outside.the-prefix", num_partitions=1)
    log.commit(f"{topic}.group", topic, {0: 0})  # Kafka makes its topic of offsets for that
    assert {"outside.the-prefix", "__consumer_offsets"} <= set(tool(KafkaAdminClient).list_topics())
    assert log.topics() == {topic: 2}


def test_a_batch_of_several_chunks_arrives_complete_and_in_order(log: KafkaLog, topic: str) -> None:
    log.create_topic(topic, num_partitions=3)
    filler = os.urandom(4000)
    count = 5 * CHUNK_BYTES // (2 * len(filler))
    log.append(topic, [LogEntry(f"{index % 7}".encode(), b"%d " % index + filler) for index in range(count)])
    found = read_all(log, topic)
    assert sorted(int(entry.value.split(b" ", 1)[0]) for entry in found) == list(range(count))
    for key in {entry.key for entry in found}:
        numbers = [int(entry.value.split(b" ", 1)[0]) for entry in found if entry.key == key]
        assert numbers == sorted(numbers)


def test_reading_takes_no_more_memory_for_a_longer_window(log: KafkaLog, topic: str) -> None:
    log.create_topic(topic, num_partitions=1)
    for _ in range(6):
        log.append(topic, [LogEntry(b"k", os.urandom(8000)) for _ in range(1000)])  # 48 MB in all
    process = psutil.Process()
    reader = log.read(topic, 0, 0, 6000)
    for _ in range(500):
        next(reader)
    before = most = process.memory_info().rss
    for index, _ in enumerate(reader):
        if index % 100 == 0:
            most = max(most, process.memory_info().rss)
    assert most - before < 24 * 2**20


def test_batches_over_a_topics_limit_are_split_and_nothing_is_lost(
    log: KafkaLog, topic: str, admin: KafkaConfig
) -> None:
    log.create_topic(topic, num_partitions=1)
    with KafkaAdmin(admin) as cluster:
        cluster.set_configs(topic, {"max.message.bytes": "20000"})
    sent = [os.urandom(3000) for _ in range(100)]
    log.append(topic, [LogEntry(b"k", value) for value in sent])
    assert values(log, topic) == sent


def test_entries_over_our_own_limit_are_refused_and_the_others_arrive(admin: KafkaConfig, topic: str) -> None:
    log = KafkaLog(admin.model_copy(update={"max_record_bytes": 2048}))
    log.create_topic(topic, num_partitions=1)
    with pytest.raises(AppendError, match=r"of 3 entries for topic .* 1 were refused and 0 failed") as told:
        log.append(topic, [LogEntry(b"k", b"1"), LogEntry(b"k", bytes(2048)), LogEntry(b"k", b"2")])
    assert told.value.failed == {}
    assert {index: type(error) for index, error in told.value.refused.items()} == {1: RecordTooLargeError}
    assert values(log, topic) == [b"1", b"2"]
    log.close()


def test_many_entries_over_a_topics_limit_do_not_take_the_others_down(
    log: KafkaLog, topic: str, admin: KafkaConfig
) -> None:
    log.create_topic(topic, num_partitions=2)
    with KafkaAdmin(admin) as cluster:
        cluster.set_configs(topic, {"max.message.bytes": "10000"})
    entries = [
        LogEntry(f"{index}".encode(), os.urandom(50_000) if index % 3 == 0 else b"%d" % index) for index in range(60)
    ]
    for _ in range(2):  # the second time the limit is known
        with pytest.raises(AppendError) as told:
            log.append(topic, entries)
        assert sorted(told.value.refused) == list(range(0, 60, 3))
        assert told.value.failed == {}
    arrived = sorted({int(value) for value in values(log, topic)})
    assert arrived == [index for index in range(60) if index % 3]


def test_a_raised_limit_is_noticed(log: KafkaLog, topic: str, admin: KafkaConfig) -> None:
    log.create_topic(topic, num_partitions=1)
    large = [LogEntry(b"k", os.urandom(50_000))]
    with KafkaAdmin(admin) as cluster:
        cluster.set_configs(topic, {"max.message.bytes": "10000"})
        for _ in range(2):
            with pytest.raises(AppendError):
                log.append(topic, large)
        cluster.set_configs(topic, {"max.message.bytes": None})
        for _ in range(2):
            log.append(topic, large)
    assert values(log, topic) == [large[0].value] * 2


def test_expired_entries_leave_a_gap_at_the_low_end_only(log: KafkaLog, topic: str, tool: Tool) -> None:
    from kafka import KafkaAdminClient, TopicPartition

    log.create_topic(topic, num_partitions=2)
    log.append(topic, [LogEntry(b"k", b"%d" % index) for index in range(100)])
    number = partition_of(b"k", 2)
    tool(KafkaAdminClient).delete_records({TopicPartition(topic, number): 40})
    assert log.start_offsets(topic) == {number: 40, 1 - number: 0}
    assert log.end_offsets(topic) == {number: 100, 1 - number: 0}
    assert [entry.offset for entry in log.read(topic, number, 0, 100)] == list(range(40, 100))
    assert list(log.read(topic, number, 0, 40)) == []
    tool(KafkaAdminClient).delete_records({TopicPartition(topic, number): 100})
    assert log.start_offsets(topic) == log.end_offsets(topic) == {number: 100, 1 - number: 0}
    assert list(log.read(topic, number, 0, 100)) == []


def test_entries_that_expire_under_a_reader_are_passed_over(log: KafkaLog, topic: str, tool: Tool) -> None:
    from kafka import KafkaAdminClient, TopicPartition

    log.create_topic(topic, num_partitions=1)
    for _ in range(4):
        log.append(topic, [LogEntry(b"k", os.urandom(4000)) for _ in range(1000)])
    reader = log.read(topic, 0, 0, 4000)
    found = [next(reader).offset for _ in range(10)]
    tool(KafkaAdminClient).delete_records({TopicPartition(topic, 0): 3990})
    found += [entry.offset for entry in reader]
    assert found[:10] == list(range(10))
    assert found[-10:] == list(range(3990, 4000))
    assert found == sorted(set(found))
    assert len(found) < 4000


def test_offsets_that_hold_no_record_do_not_hold_a_reader_up(log: KafkaLog, topic: str, tool: Tool) -> None:
    from kafka import KafkaProducer

    log.create_topic(topic, num_partitions=1)
    producer = tool(KafkaProducer, transactional_id=f"{topic}.tx")
    producer.init_transactions()
    for turn in range(3):  # each transaction ends in a marker, which has an offset and no record
        producer.begin_transaction()
        producer.send(topic, key=b"k", value=b"%d" % turn)
        producer.commit_transaction()
    assert log.end_offsets(topic) == {0: 6}
    before = time.monotonic()
    assert [(entry.offset, entry.value) for entry in log.read(topic, 0, 0, 6)] == [(0, b"0"), (2, b"1"), (4, b"2")]
    assert list(log.read(topic, 0, 5, 6)) == []
    assert time.monotonic() - before < 5


def test_compacted_entries_do_not_hold_a_reader_up(log: KafkaLog, topic: str, admin: KafkaConfig, tool: Tool) -> None:
    from kafka import KafkaAdminClient
    from kafka.admin import ConfigResource, ConfigResourceType

    client = tool(KafkaAdminClient)
    client.alter_configs([ConfigResource(ConfigResourceType.BROKER, "1", {"log.cleaner.backoff.ms": "100"})])
    log.create_topic(topic, num_partitions=1)
    with KafkaAdmin(admin) as cluster:
        for key, value in (
            ("min.cleanable.dirty.ratio", "0.001"),
            ("segment.ms", "100"),
            ("cleanup.policy", "compact"),
        ):
            cluster.set_configs(topic, {key: value})
    log.append(topic, [LogEntry(b"same", b"%d" % index) for index in range(50)] + [LogEntry(b"last", b"")])
    deadline = time.monotonic() + 20
    found = list(range(51))
    while len(found) > 3 and time.monotonic() < deadline:
        log.append(topic, [LogEntry(b"tick", b"")])  # a segment is rolled, and then cleaned, by what follows it
        time.sleep(0.3)
        found = [entry.offset for entry in log.read(topic, 0, 0, 51)]
    assert found == [49, 50]


def test_a_null_key_or_value_of_another_writer_reads_as_empty(log: KafkaLog, topic: str, tool: Tool) -> None:
    from kafka import KafkaProducer

    log.create_topic(topic, num_partitions=1)
    producer = tool(KafkaProducer)
    producer.send(topic, key=b"tenant", value=None).get(timeout=10)
    producer.send(topic, key=None, value=b"v").get(timeout=10)
    assert [(entry.key, entry.value) for entry in read_all(log, topic)] == [(b"tenant", b""), (b"", b"v")]


def test_a_partition_that_is_not_there_is_named(log: KafkaLog, topic: str) -> None:
    log.create_topic(topic, num_partitions=2)
    with pytest.raises(InputError, match="has no partition 2"):
        list(log.read(topic, 2, 0, 1))
    with pytest.raises(InputError, match="has no partition 2"):
        log.commit(f"{topic}.group", topic, {2: 0})


def test_slow_work_between_reads_repeats_and_loses_nothing(admin: KafkaConfig, topic: str) -> None:
    """A29: no membership, so nothing is taken away however long the work takes; only a commit moves the group on."""
    group = f"{topic}.curator"

    def one_run(*, crash: bool) -> list[bytes]:
        log = KafkaLog(admin)
        window = pending_window(log, topic, group)
        found = []
        for number, stop in window.stop.items():
            for entry in log.read(topic, number, window.start[number], stop):
                found.append(entry.value)
                time.sleep(0.02)
        if not crash:
            log.commit(group, topic, window.stop)
        log.close()
        return sorted(found)

    writer = KafkaLog(admin)
    writer.create_topic(topic, num_partitions=2)
    first = [b"%02d" % index for index in range(30)]
    writer.append(topic, [LogEntry(value, value) for value in first])
    assert one_run(crash=True) == first
    assert one_run(crash=False) == first
    second = [b"%02d" % index for index in range(30, 40)]
    writer.append(topic, [LogEntry(value, value) for value in second])
    assert one_run(crash=True) == second
    assert one_run(crash=False) == second
    assert one_run(crash=False) == []
    writer.close()


def test_a_group_with_a_live_member_is_not_committed_over(log: KafkaLog, topic: str, tool: Tool) -> None:
    from kafka import KafkaConsumer

    log.create_topic(topic, num_partitions=1)
    group = f"{topic}.busy"
    member = tool(KafkaConsumer, group_id=group, auto_offset_reset="earliest")
    member.subscribe([topic])
    while not member.assignment():
        member.poll(timeout_ms=200)
    with pytest.raises(BrokerError, match=f"could not commit offsets of group '{group}': another consumer") as told:
        log.commit(group, topic, {0: 0})
    assert "stop that consumer" in (told.value.mend or "")


def test_a_topic_made_anew_is_told_from_one_that_went_on(log: KafkaLog, topic: str, tool: Tool) -> None:
    from kafka import KafkaAdminClient

    group = f"{topic}.curator"
    log.create_topic(topic, num_partitions=1)
    log.append(topic, [LogEntry(b"k", b"v")] * 5)
    log.commit(group, topic, {0: 5})
    tool(KafkaAdminClient).delete_topics([topic])
    while topic in log.topics():
        time.sleep(0.05)
    log.create_topic(topic, num_partitions=1)
    log.commit(group, topic, {0: 5})
    with pytest.raises(InputError, match=r"committed offset 5 .*ends at 0: the topic was made anew"):
        pending_window(log, topic, group)


def test_a_topic_deleted_under_the_producer_is_told_as_missing(admin: KafkaConfig, topic: str, tool: Tool) -> None:
    from kafka import KafkaAdminClient

    log = KafkaLog(admin.model_copy(update={"delivery_timeout_s": 2.0}))
    log.create_topic(topic, num_partitions=1)
    log.append(topic, [LogEntry(b"k", b"v")])
    tool(KafkaAdminClient).delete_topics([topic])
    with pytest.raises(MissingTopicError, match=f"no topic '{topic}'"):
        log.append(topic, [LogEntry(b"k", b"v")])
    log.close()


def test_a_silence_that_nothing_explains_is_told_as_that(log: KafkaLog, topic: str) -> None:
    from kafka.errors import KafkaTimeoutError

    log.create_topic(topic, num_partitions=1)
    told = log._explained(KafkaTimeoutError(), "append to", topic)  # one node is never short of replicas
    assert type(told) is BrokerUnreachableError
    assert (
        told.message
        == f"could not append to topic {topic!r}: the broker answers other questions, but not this one in time"
    )
    assert "min.insync.replicas" in (told.mend or "")


def test_threads_share_a_log(log: KafkaLog, topic: str) -> None:
    log.create_topic(topic, num_partitions=3)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                log.append(topic, [LogEntry(b"%d" % number, b"%d-%d" % (number, turn))])
                log.committed(f"{topic}.group", topic)
                read_all(log, topic)
        except BaseException as error:  # noqa: BLE001  shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(values(log, topic)) == sorted(b"%d-%d" % (number, turn) for number in range(6) for turn in range(10))


def test_closing_leaves_no_thread_and_no_socket(admin: KafkaConfig, topic: str) -> None:
    threads, sockets = set(threading.enumerate()), len(psutil.Process().net_connections())
    log = KafkaLog(admin)
    log.create_topic(topic, num_partitions=2)
    log.append(topic, [LogEntry(b"k", b"v")] * 10)
    number = partition_of(b"k", 2)
    readers = [log.read(topic, number, 0, 10) for _ in range(6)]
    for reader in readers:
        next(reader)
    assert len(psutil.Process().net_connections()) > sockets
    log.close()
    log.close()
    del reader, readers  # left behind while open, and after the log was closed
    assert set(threading.enumerate()) == threads
    assert len(psutil.Process().net_connections()) == sockets
    with pytest.raises(BrokerError, match="the log is closed"):
        log.end_offsets(topic)
    with pytest.raises(BrokerError, match="the log is closed"):
        log.append(topic, [LogEntry(b"k", b"v")])


def test_a_forked_child_is_told_to_open_its_own(log: KafkaLog, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log.create_topic(topic, num_partitions=1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(BrokerError, match="used after a fork"):
        log.topics()

"""The capture log on Apache Kafka: the same contract as the other logs, over kafka-python.

Readers use `assign` and no group: nothing ever rebalances, however long the work between two reads takes. Progress is
committed as explicit offsets, without membership.

Delivery is at least once. What `append` reports as failed may have arrived after all (a lost answer looks like a lost
record), so a caller that hands it in again can make a duplicate; record ids remove those downstream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka import errors as kafka_errors
from kafka.admin import OffsetSpec

from draftloop.pipeline.errors import (
    AppendError,
    BrokerUnreachableError,
    DraftloopError,
    InputError,
    RecordTooLargeError,
)
from draftloop.pipeline.stream.kafka_clients import POLL_MS, KafkaClients, Producer
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.kafka_connect import translate
from draftloop.pipeline.stream.log import (
    LogEntry,
    Offsets,
    StoredEntry,
    partition_of,
    require_partitions,
    unknown_topic,
)

Failures = dict[int, Exception]  # index in a batch -> what a client said

CHUNK_BYTES = 8 * 2**20  # of an append in flight at once: a producer's memory has no bound of its own
CHUNK_ENTRIES = 4096
PROVEN_TOO_LARGE = 3  # lone refusals in one append after which what is as large is not tried any more
GRACE_S = 1.0  # beyond the delivery time-out, for the client to say so

_UNKNOWN_TOPIC, _NOT_ALLOWED, _BAD_TOPIC = 3, 29, 17  # error codes of a topic in Kafka's metadata
_TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)


class KafkaLog:
    """CaptureLog over a Kafka cluster. Safe for threads; a forked child must open its own.

    The constructor does not connect. Raises ConfigError where addresses or the security block are missing.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._clients = KafkaClients(config)
        self._appending = threading.Lock()  # the producer holds one append's entries and no others
        self._known: tuple[Producer | None, set[str]] = (None, set())  # topics that this producer has seen
        self._too_large: dict[str, int] = {}  # topic -> bytes of the smallest entry its limit has refused

    def create_topic(self, topic: str, *, num_partitions: int) -> None:
        """As CaptureLog; needs the right to create topics. Also raises InputError for less than one partition."""
        require_partitions(topic, num_partitions)
        known = self._count(topic)
        if known is None:
            self._clients.ask("create", f"topic {topic!r}", lambda control: _create(control, topic, num_partitions))
            known = self._count(topic)  # somebody else may have been faster, with another count
        require_partitions(topic, num_partitions, known)

    def topics(self) -> dict[str, int]:
        """As CaptureLog: topics under `topic_prefix` that this principal may see."""
        found = self._clients.ask("list", "topics", lambda control: control.describe_topics())
        return {
            topic["name"]: len(topic["partitions"])
            for topic in found
            if topic["name"].startswith(self._config.topic_prefix) and not topic["is_internal"] and topic["partitions"]
        }

    def topic_id(self, topic: str) -> str:
        """As CaptureLog: the cluster's own id of the topic."""
        return str(self._described(topic)["topic_id"])

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        """As CaptureLog; on every in-sync replica when this returns, within `delivery_timeout_s` per 8 MiB.

        An AppendError's `refused` are over `max_record_bytes` or the topic's own limit. Where all failed for one
        reason, that error is raised itself.
        """
        with self._appending:
            refused: dict[int, DraftloopError] = {}
            failed: Failures = {}
            sendable: list[int] = []
            for index, entry in enumerate(entries):
                if _size(entry) > self._config.max_record_bytes:
                    refused[index] = _refusal(topic, entry, f"max_record_bytes = {self._config.max_record_bytes}")
                else:
                    sendable.append(index)
            self._producer_for(topic)
            for chunk in self._chunks(topic, entries, sendable):
                if failed:
                    failed |= dict.fromkeys(chunk, next(iter(failed.values())))
                else:
                    failed |= self._deliver(topic, entries, chunk, refused)
            if refused or failed:
                raise self._outcome(topic, len(entries), refused, failed)

    def start_offsets(self, topic: str) -> Offsets:
        """As CaptureLog."""
        return self._offsets(topic, OffsetSpec.EARLIEST)

    def end_offsets(self, topic: str) -> Offsets:
        """As CaptureLog."""
        return self._offsets(topic, OffsetSpec.LATEST)

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
        """As CaptureLog, in flat memory. Raises BrokerUnreachableError after `request_timeout_s` without progress.

        Offsets that expired, were compacted away or hold no record are passed over.
        """
        starts, ends = self.start_offsets(topic), self.end_offsets(topic)
        if partition not in ends:
            raise InputError(f"topic {topic!r} has no partition {partition}", mend=f"it has {len(ends)}")
        position, stop = max(start, starts[partition]), min(stop, ends[partition])
        if position >= stop:
            return
        reader = self._clients.take_reader()
        usable = True
        try:
            yield from self._stream(reader, TopicPartition(topic, partition), position, stop)
        except DraftloopError:
            usable = False
            raise
        finally:  # also where the caller leaves the iterator behind
            self._clients.return_reader(reader, usable=usable)

    def committed(self, group: str, topic: str) -> Offsets:
        """As CaptureLog."""
        places = [TopicPartition(topic, number) for number in range(self._require(topic))]
        answer = self._clients.ask(
            "read the offsets of", f"group {group!r}", lambda control: control.list_group_offsets({group: places})
        )[group]
        return {place.partition: max(0, answer[place].offset) if place in answer else 0 for place in places}

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """As CaptureLog: without membership of the group. Raises BrokerError where a consumer is a member of it."""
        count = self._require(topic)
        for number in offsets:
            if not 0 <= number < count:
                raise InputError(f"topic {topic!r} has no partition {number}", mend=f"it has {count}")
        wanted = {
            TopicPartition(topic, number): OffsetAndMetadata(offset, "", -1) for number, offset in offsets.items()
        }
        self._clients.ask(
            "commit offsets of",
            f"group {group!r}",
            lambda control: _raise_first(control.alter_group_offsets(group, wanted)),
        )

    def close(self) -> None:
        """As CaptureLog, bounded in time. A second call does nothing."""
        self._clients.close()

    # --- topics

    def _seen(self, topic: str) -> Mapping[str, Any] | None:
        """What the cluster says of a topic, None where it is not there. Raises AccessDeniedError, InputError."""
        resource = f"topic {topic!r}"
        found: Mapping[str, Any] = self._clients.ask("see", resource, lambda control: control.describe_topics([topic]))[
            0
        ]
        code = found["error_code"]
        if code == _UNKNOWN_TOPIC:
            return None
        if code in (_NOT_ALLOWED, _BAD_TOPIC):
            error = kafka_errors.for_code(code)()
            raise translate(error, self._config, act="see", resource=resource) from error
        return found

    def _count(self, topic: str) -> int | None:
        """A topic's partitions, None where it is not there. Raises AccessDeniedError, InputError."""
        found = self._seen(topic)
        return None if found is None else len(found["partitions"])

    def _described(self, topic: str) -> Mapping[str, Any]:
        found = self._seen(topic)
        if found is None:
            raise unknown_topic(topic, list(self.topics()))
        return found

    def _require(self, topic: str) -> int:
        return len(self._described(topic)["partitions"])

    def _offsets(self, topic: str, spec: OffsetSpec) -> Offsets:
        places = {TopicPartition(topic, number): spec for number in range(self._require(topic))}
        found = self._clients.ask(
            "read the offsets of", f"topic {topic!r}", lambda control: control.list_partition_offsets(places)
        )
        return {place.partition: found[place].offset for place in places}

    def _explained(self, error: BaseException, act: str, topic: str) -> DraftloopError:
        """As KafkaClients.explained; also tells a topic that is gone, or not ours to see: to a client a time-out."""
        if isinstance(error, kafka_errors.RetriableError | ValueError):
            why = self._clients.trouble()
            if why is not None:
                return why
            try:
                self._require(topic)
            except DraftloopError as seen:
                return seen
        if isinstance(error, kafka_errors.KafkaTimeoutError):
            return BrokerUnreachableError(
                f"could not {act} topic {topic!r}: the broker answers other questions, but not this one in time",
                mend="too few replicas may be in sync (min.insync.replicas), or the broker is overloaded: see its log",
            )
        return translate(error, self._config, act=act, resource=f"topic {topic!r}")

    # --- appending

    def _producer_for(self, topic: str) -> Producer:
        """The producer. It would wait for a topic that is not there until a time-out: raises MissingTopicError."""
        producer = self._clients.producer()
        if self._known[0] is not producer:
            self._known = (producer, set())
        if topic not in self._known[1]:
            self._require(topic)
            self._known[1].add(topic)
        return producer

    def _chunks(self, topic: str, entries: Sequence[LogEntry], indices: Sequence[int]) -> Iterator[list[int]]:
        """Parts of an append, in order; what the topic's limit may refuse goes alone, for the others' sake."""
        chunk: list[int] = []
        held = 0
        for index in indices:
            size = _size(entries[index])
            risky = size >= self._too_large.get(topic, size + 1)
            if chunk and (risky or held + size > CHUNK_BYTES or len(chunk) == CHUNK_ENTRIES):
                yield chunk
                chunk, held = [], 0
            chunk.append(index)
            held = CHUNK_BYTES + 1 if risky else held + size  # full: the next goes into another
        if chunk:
            yield chunk

    def _deliver(
        self, topic: str, entries: Sequence[LogEntry], chunk: Sequence[int], refused: dict[int, DraftloopError]
    ) -> Failures:
        """Send one chunk; what is too large is added to `refused`, what failed otherwise is returned."""
        failed = self._send(topic, entries, chunk)
        if not any(isinstance(error, _TOO_LARGE) for error in failed.values()):
            if not failed and len(chunk) == 1 and _size(entries[chunk[0]]) >= self._too_large.get(topic, 1 << 62):
                del self._too_large[topic]  # the limit was raised, or this entry packs well
            return failed
        # kafka-python fails everything a producer holds together with one entry that is too large. Only an entry sent
        # alone tells; one after the other, so that equal keys keep their order.
        suspects = sorted(failed)
        proven = 0
        for place, index in enumerate(suspects):
            size = _size(entries[index])
            if proven < PROVEN_TOO_LARGE or size < self._too_large[topic]:
                lone = failed if len(chunk) == 1 else self._send(topic, entries, [index])
                if not lone:
                    continue
                if not isinstance(lone[index], _TOO_LARGE):
                    return dict.fromkeys(suspects[place:], lone[index])
                proven += 1
                self._too_large[topic] = min(size, self._too_large.get(topic, size))
            refused[index] = _refusal(topic, entries[index], "the topic's max.message.bytes")
        return {}

    def _send(self, topic: str, entries: Sequence[LogEntry], indices: Sequence[int]) -> Failures:
        """Send and wait for every answer. A producer with a failure is dropped: it may still hold entries."""
        deadline = time.monotonic() + self._config.delivery_timeout_s + GRACE_S
        failed: Failures = {}
        sent: dict[int, Any] = {}
        try:
            producer = self._producer_for(topic)
        except DraftloopError as error:  # earlier chunks may have arrived: the caller must hear which did not
            return dict.fromkeys(indices, error)
        try:
            count = len(producer.partitions_for(topic))
            for index in indices:
                entry = entries[index]
                place = partition_of(entry.key, count)
                sent[index] = producer.send(topic, key=entry.key, value=entry.value, partition=place)
        except (kafka_errors.KafkaError, ValueError) as error:  # ValueError: a partition that is gone
            failed = {index: error for index in indices if index not in sent}
        for index, answer in sent.items():
            try:
                answer.get(timeout=max(0.0, deadline - time.monotonic()))
            except kafka_errors.KafkaError as error:
                failed[index] = error
        if failed:
            self._clients.drop_producer(producer)
        return failed

    def _outcome(
        self, topic: str, total: int, refused: Mapping[int, DraftloopError], failed: Failures
    ) -> DraftloopError:
        why: dict[type[Exception], DraftloopError] = {}
        for error in failed.values():
            if type(error) not in why:
                why[type(error)] = self._explained(error, "append to", topic)
        told = {index: why[type(error)] for index, error in failed.items()}
        if len(told) == total and len({type(error) for error in told.values()}) == 1:
            return next(iter(told.values()))
        first = next(iter({**refused, **told}.values()))
        return AppendError(
            f"of {total} entries for topic {topic!r} {len(refused)} were refused and {len(failed)} failed;"
            f" the first: {first.message}",
            refused=refused,
            failed=told,
            mend=first.mend,
        )

    # --- reading

    def _stream(self, reader: KafkaConsumer, place: TopicPartition, position: int, stop: int) -> Iterator[StoredEntry]:
        """By position, not by count: an offset may hold no record."""
        reader.assign([place])
        reader.seek(place, position)
        moved = time.monotonic()
        while position < stop:
            try:
                polled = reader.poll(timeout_ms=POLL_MS)
                reached = reader.position(place)
            except kafka_errors.OffsetOutOfRangeError:  # expired since the start was looked up
                position = max(position, self.start_offsets(place.topic)[place.partition])
                reader.seek(place, position)
                continue
            except kafka_errors.KafkaError as error:
                raise self._explained(error, "read", place.topic) from error
            for record in polled.get(place, ()):
                if record.offset >= stop:
                    return
                yield StoredEntry(
                    place.partition, record.offset, record.timestamp, record.key or b"", record.value or b""
                )
            if reached > position:
                position, moved = reached, time.monotonic()
            elif time.monotonic() - moved > self._config.request_timeout_s:
                raise self._explained(kafka_errors.KafkaTimeoutError(), "read", place.topic)


def _create(control: KafkaAdminClient, topic: str, num_partitions: int) -> None:
    wanted = {topic: {"num_partitions": num_partitions, "replication_factor": -1}}  # -1: the cluster's own
    try:
        control.create_topics(wanted, wait_for_metadata=True)
    except kafka_errors.TopicAlreadyExistsError:  # somebody was faster, or this is the second try
        return


def _raise_first(answer: Mapping[TopicPartition, type[kafka_errors.KafkaError]]) -> None:
    for error in answer.values():
        if error is not kafka_errors.NoError:
            raise error()


def _size(entry: LogEntry) -> int:
    return len(entry.key) + len(entry.value)


def _refusal(topic: str, entry: LogEntry, limit: str) -> RecordTooLargeError:
    return RecordTooLargeError(
        f"an entry of {_size(entry)} bytes for topic {topic!r} is over {limit}",
        mend="keep less of each request, or raise max_record_bytes and the topic's max.message.bytes together",
    )

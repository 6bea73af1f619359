"""The capture log on Apache Kafka: the same contract as the other logs, over kafka-python.

Three kinds of clients, each made when first needed and thrown away when it broke: one that asks (topics, offsets,
commits), one producer, and a few readers. Readers use `assign` and no group: nothing ever rebalances, however long the
work between two reads takes.

Delivery is at least once. What `append` reports as failed may have arrived after all (a lost answer looks like a lost
record), so a caller that hands it in again can make a duplicate; record ids remove those downstream.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition
from kafka import errors as kafka_errors
from kafka.admin import OffsetSpec
from kafka.net.compat import KafkaNetClient

from draftloop.pipeline.errors import (
    AppendError,
    BrokerError,
    DraftloopError,
    InputError,
    RecordTooLargeError,
)
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.kafka_connect import client_options, probe, translate
from draftloop.pipeline.stream.log import LogEntry, Offsets, StoredEntry, partition_of, unknown_topic

T = TypeVar("T")
Failures = dict[int, Exception]  # index in a batch -> what a client said

LINGER_MS = 5  # a batch is handed over faster than that: it leaves in as few requests as may be
BATCH_BYTES = 256 * 1024
CHUNK_BYTES = 8 * 2**20  # of an append in flight at once: a producer's memory has no bound of its own
CHUNK_ENTRIES = 4096
FETCH_BYTES = 2**20  # a reader holds about two answers of this size; a larger record still comes through
IDLE_READERS = 4
PROVEN_TOO_LARGE = 3  # lone refusals in one append after which what is as large is not tried any more
GRACE_S = 1.0  # beyond the delivery time-out, for the client to say so
CLOSE_S = 2.0  # a producer's thread gets this to end
POLL_MS = 500
PAUSE_S = 0.1  # between tries at a cluster that is electing, loading or restarting

_UNKNOWN_TOPIC, _NOT_ALLOWED, _BAD_TOPIC = 3, 29, 17  # error codes of a topic in Kafka's metadata
_TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)


class _Producer(KafkaProducer):  # type: ignore[misc]
    def discard(self) -> None:
        """End it without sending what it may still hold; `close` waits for that, and fails where it takes too long."""
        self._sender.force_close()
        self._sender.join(CLOSE_S)  # a thread that waits for a frozen broker ends by itself at the request time-out
        if self._metrics:
            self._metrics.close()
        self._unregister_cleanup()
        self._closed = True


class KafkaLog:
    """CaptureLog over a Kafka cluster. Safe for threads; a forked child must open its own.

    The constructor does not connect. Raises ConfigError where addresses or the security block are missing.
    """

    def __init__(self, config: KafkaConfig) -> None:
        config.required()
        self._config = config
        self._pid = os.getpid()
        self._state = threading.Lock()  # guards the fields below; never held during I/O
        self._making = threading.Lock()  # one client is made at a time
        self._appending = threading.Lock()  # the producer holds one append's entries and no others
        self._control: KafkaAdminClient | None = None
        self._producer: _Producer | None = None
        self._readers: list[KafkaConsumer] = []
        self._known_topics: set[str] = set()  # by the producer
        self._too_large: dict[str, int] = {}  # topic -> bytes of the smallest entry its limit has refused
        self._reached = False  # the probe found the cluster and no client has failed since
        self._closed = False

    def create_topic(self, topic: str, *, num_partitions: int) -> None:
        """As CaptureLog; needs the right to create topics. Also raises InputError for less than one partition."""
        if num_partitions < 1:
            raise InputError(f"topic {topic!r} with {num_partitions} partitions", mend="give it at least one")
        wanted = {topic: {"num_partitions": num_partitions, "replication_factor": -1}}
        try:
            if self._count(topic) is None:
                self._ask(
                    "create", f"topic {topic!r}", lambda control: control.create_topics(wanted, wait_for_metadata=True)
                )
        except _Exists:
            pass
        known = self._count(topic)
        if known != num_partitions:
            raise InputError(
                f"topic {topic!r} has {known} partitions, not {num_partitions}",
                mend="use that count, or a topic of another name: a key's partition must not change",
            )

    def topics(self) -> dict[str, int]:
        """As CaptureLog: topics under `topic_prefix` that this principal may see."""
        found = self._ask("list", "topics", lambda control: control.describe_topics())
        return {
            topic["name"]: len(topic["partitions"])
            for topic in found
            if topic["name"].startswith(self._config.topic_prefix) and not topic["is_internal"] and topic["partitions"]
        }

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
                size = len(entry.key) + len(entry.value)
                if size > self._config.max_record_bytes:
                    refused[index] = _too_large(topic, size, f"max_record_bytes = {self._config.max_record_bytes}")
                else:
                    sendable.append(index)
            self._ready(topic)
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
        reader = self._take_reader()
        kept = True
        try:
            yield from self._stream(reader, TopicPartition(topic, partition), position, stop)
        except (DraftloopError, kafka_errors.KafkaError):
            kept = False
            raise
        finally:
            self._return_reader(reader, kept=kept)

    def committed(self, group: str, topic: str) -> Offsets:
        """As CaptureLog. Raises InputError where the topic is shorter than what was committed: it was made anew."""
        ends = self.end_offsets(topic)
        partitions = [TopicPartition(topic, number) for number in ends]
        answer = self._ask(
            "read the offsets of",
            f"group {group!r}",
            lambda control: control.list_group_offsets({group: partitions}),
        )
        stored = {place.partition: max(0, found.offset) for place, found in answer[group].items()}
        committed = {number: stored.get(number, 0) for number in ends}
        for number, offset in committed.items():
            if offset > ends[number]:
                raise InputError(
                    f"group {group!r} has committed offset {offset} of topic {topic!r} partition {number},"
                    f" which ends at {ends[number]}: the topic was deleted and made anew",
                    mend="use another group name, or delete the group's offsets once its old records are not needed",
                )
        return committed

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """As CaptureLog: without membership of the group. Raises BrokerError where a consumer is a member of it."""
        count = self._require(topic)
        unknown = [number for number in offsets if not 0 <= number < count]
        if unknown:
            raise InputError(f"topic {topic!r} has no partition {unknown[0]}", mend=f"it has {count}")
        resource = f"group {group!r}"
        wanted = {
            TopicPartition(topic, number): OffsetAndMetadata(offset, "", -1) for number, offset in offsets.items()
        }
        answer = self._ask(
            "commit offsets of", resource, lambda control: _checked(control.alter_group_offsets(group, wanted))
        )
        assert len(answer) == len(wanted)

    def close(self) -> None:
        """As CaptureLog. Bounded: a producer's thread gets 2 s. A second call does nothing."""
        with self._state:
            self._closed = True
            control, producer, readers = self._control, self._producer, self._readers
            self._control = self._producer = None
            self._readers = []
        if producer is not None:
            producer.discard()
        for reader in readers:
            _close_reader(reader)
        if control is not None:
            control.close()

    # --- clients

    def _open(self, kind: type[T], options: Mapping[str, Any]) -> T:
        """A client, after a look at the cluster where the last one failed. Raises what `probe` and `translate` do."""
        self._require_usable()
        if not self._reached:
            probe(self._config)
            self._reached = True
        nets: list[KafkaNetClient] = []

        def remembered(**configs: Any) -> KafkaNetClient:
            nets.append(KafkaNetClient(**configs))
            return nets[-1]

        try:
            return kind(**{**client_options(self._config), **options, "kafka_client": remembered})
        except kafka_errors.KafkaError as error:
            for net in nets:  # a constructor that fails leaves its thread and sockets behind
                net.close()
            raise self._explained(error, "connect to", "the cluster") from error

    def _controller(self) -> KafkaAdminClient:
        with self._making:
            with self._state:
                control = self._control
            if control is None:
                control = self._open(KafkaAdminClient, {})
                with self._state:
                    if not self._closed:
                        self._control = control
                if self._control is not control:
                    control.close()
                    self._require_usable()
            return control

    def _drop_controller(self, control: KafkaAdminClient) -> None:
        with self._state:
            ours = self._control is control
            if ours:
                self._control = None
        if ours:
            control.close()

    def _ready(self, topic: str) -> _Producer:
        """The producer, which knows the topic. Raises MissingTopicError."""
        with self._making:
            with self._state:
                producer = self._producer
            if producer is None:
                producer = self._open(_Producer, self._producer_options())
                with self._state:
                    self._known_topics.clear()
                    if not self._closed:
                        self._producer = producer
                if self._producer is not producer:
                    producer.discard()
                    self._require_usable()
        if topic not in self._known_topics:  # the producer alone would wait for a missing one until a time-out
            self._require(topic)
            self._known_topics.add(topic)
        return producer

    def _producer_options(self) -> dict[str, Any]:
        config = self._config
        delivery_ms = max(LINGER_MS + 2, round(config.delivery_timeout_s * 1000))
        return {
            "acks": "all",
            "enable_idempotence": True,
            "compression_type": None if config.compression == "none" else config.compression,
            "linger_ms": LINGER_MS,
            "batch_size": BATCH_BYTES,
            "max_request_size": config.max_record_bytes + 65536,  # with what Kafka adds to a record
            "max_block_ms": round(config.request_timeout_s * 1000),
            "delivery_timeout_ms": delivery_ms,
            "request_timeout_ms": min(round(config.request_timeout_s * 1000), delivery_ms - LINGER_MS - 1),
            "allow_auto_create_topics": False,
            "metrics_enabled": False,
        }

    def _drop_producer(self, producer: _Producer) -> None:
        with self._state:
            if self._producer is producer:
                self._producer = None
        producer.discard()

    def _take_reader(self) -> KafkaConsumer:
        with self._state:
            if self._readers:
                return self._readers.pop()
        with self._making:
            return self._open(
                KafkaConsumer,
                {
                    "group_id": None,
                    "enable_auto_commit": False,
                    "auto_offset_reset": "none",
                    "allow_auto_create_topics": False,
                    "fetch_max_wait_ms": min(POLL_MS, round(self._config.request_timeout_s * 500)),
                    "fetch_max_bytes": FETCH_BYTES,
                    "max_partition_fetch_bytes": FETCH_BYTES,
                    "metrics_enabled": False,
                },
            )

    def _return_reader(self, reader: KafkaConsumer, *, kept: bool) -> None:
        if kept:
            reader.unsubscribe()
            with self._state:
                kept = not self._closed and len(self._readers) < IDLE_READERS
                if kept:
                    self._readers.append(reader)
        if not kept:
            _close_reader(reader)

    def _require_usable(self) -> None:
        if self._closed:
            raise BrokerError("the log is closed", mend="open it again")
        if os.getpid() != self._pid:
            raise BrokerError(
                f"the log was opened by process {self._pid} and used after a fork",
                mend="open it in the process that uses it",
            )

    # --- asking

    def _ask(self, act: str, resource: str, question: Callable[[KafkaAdminClient], T]) -> T:
        """Ask until there is an answer, `request_timeout_s` at most; each further try with a new connection."""
        deadline = time.monotonic() + self._config.request_timeout_s
        while True:
            self._require_usable()
            control = self._controller()
            try:
                return question(control)
            except kafka_errors.TopicAlreadyExistsError as error:
                raise _Exists from error
            except (kafka_errors.RetriableError, kafka_errors.UnknownBrokerIdError) as error:
                self._drop_controller(control)
                if time.monotonic() > deadline:
                    raise self._explained(error, act, resource) from error
            except kafka_errors.KafkaError as error:
                raise translate(error, self._config, act=act, resource=resource) from error
            except RuntimeError:  # another thread has just dropped this client
                if self._control is control:
                    raise
            self._reached = False
            time.sleep(PAUSE_S)

    def _count(self, topic: str) -> int | None:
        """A topic's partitions, None where it is not there. Raises AccessDeniedError, InputError."""
        resource = f"topic {topic!r}"
        found = self._ask("see", resource, lambda control: control.describe_topics([topic]))[0]
        code = found["error_code"]
        if code == _UNKNOWN_TOPIC:
            return None
        if code in (_NOT_ALLOWED, _BAD_TOPIC):
            error = kafka_errors.for_code(code)()
            raise translate(error, self._config, act="see", resource=resource) from error
        return len(found["partitions"])

    def _require(self, topic: str) -> int:
        count = self._count(topic)
        if count is None:
            raise unknown_topic(topic, list(self.topics()))
        return count

    def _offsets(self, topic: str, spec: OffsetSpec) -> Offsets:
        partitions = {TopicPartition(topic, number): spec for number in range(self._require(topic))}
        found = self._ask(
            "read the offsets of", f"topic {topic!r}", lambda control: control.list_partition_offsets(partitions)
        )
        return {place.partition: found[place].offset for place in partitions}

    def _explained(self, error: BaseException, act: str, resource: str, topic: str | None = None) -> DraftloopError:
        """Why a client failed: the probe's answer where the cluster cannot be reached, else the error itself."""
        if isinstance(error, kafka_errors.RetriableError):
            self._reached = False
            try:
                probe(self._config)
                if topic is not None:  # to a client a topic that is gone is a time-out
                    self._require(topic)
            except DraftloopError as why:
                return why
        return translate(error, self._config, act=act, resource=resource)

    # --- appending

    def _chunks(self, topic: str, entries: Sequence[LogEntry], indices: Sequence[int]) -> Iterator[list[int]]:
        """Parts of an append, in order; what the topic's limit may refuse goes alone, for the others' sake."""
        chunk: list[int] = []
        held = 0
        for index in indices:
            size = len(entries[index].key) + len(entries[index].value)
            risky = size >= self._too_large.get(topic, size + 1)
            if chunk and (risky or held + size > CHUNK_BYTES or len(chunk) == CHUNK_ENTRIES):
                yield chunk
                chunk, held = [], 0
            chunk.append(index)
            held += size
            if risky:
                yield chunk
                chunk, held = [], 0
        if chunk:
            yield chunk

    def _deliver(
        self, topic: str, entries: Sequence[LogEntry], chunk: Sequence[int], refused: dict[int, DraftloopError]
    ) -> Failures:
        """Send one chunk. kafka-python fails a producer's other entries together with one that is too large."""
        failed = self._send(topic, entries, chunk)
        if not any(isinstance(error, _TOO_LARGE) for error in failed.values()):
            if not failed and len(chunk) == 1:
                self._allowed(topic, entries[chunk[0]])
            return failed
        suspects = sorted(failed)
        proven = 0
        for place, index in enumerate(suspects):  # one by one and in order: only then is a refusal about the entry
            size = len(entries[index].key) + len(entries[index].value)
            lone: Failures = {}
            if proven < PROVEN_TOO_LARGE or size < self._too_large[topic]:
                lone = failed if len(chunk) == 1 else self._send(topic, entries, [index])
                if lone and not isinstance(lone[index], _TOO_LARGE):
                    return dict.fromkeys(suspects[place:], lone[index])
                if not lone:
                    continue
                proven += 1
            self._too_large[topic] = min(size, self._too_large.get(topic, size))
            refused[index] = _too_large(topic, size, "the topic's max.message.bytes")
        return {}

    def _allowed(self, topic: str, entry: LogEntry) -> None:
        """Forget a limit that let an entry through: it was raised, or the entry packs well."""
        if len(entry.key) + len(entry.value) >= self._too_large.get(topic, 1 << 62):
            del self._too_large[topic]

    def _send(self, topic: str, entries: Sequence[LogEntry], indices: Sequence[int]) -> Failures:
        """Send and wait for every answer. A producer with a failure is not used again: it may still hold entries."""
        try:
            producer = self._ready(topic)
        except DraftloopError as error:  # others of this append may have arrived: say which did not
            return dict.fromkeys(indices, error)
        deadline = time.monotonic() + self._config.delivery_timeout_s + GRACE_S
        failed: Failures = {}
        sent: dict[int, Any] = {}
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
            self._drop_producer(producer)
        return failed

    def _outcome(self, topic: str, total: int, refused: dict[int, DraftloopError], failed: Failures) -> DraftloopError:
        why: dict[type[Exception], DraftloopError] = {}
        for error in failed.values():
            if type(error) not in why:
                why[type(error)] = self._explained(error, "append to", f"topic {topic!r}", topic)
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
        resource = f"topic {place.topic!r} partition {place.partition}"
        reader.assign([place])
        reader.seek(place, position)
        moved = time.monotonic()
        while position < stop:
            try:
                polled = reader.poll(timeout_ms=POLL_MS)
                reached = reader.position(place)
            except kafka_errors.OffsetOutOfRangeError:  # expired under our hands
                position = max(position, self.start_offsets(place.topic)[place.partition])
                reader.seek(place, position)
                continue
            except kafka_errors.KafkaError as error:
                raise self._explained(error, "read", resource, place.topic) from error
            for record in polled.get(place, ()):
                if record.offset >= stop:
                    return
                yield StoredEntry(
                    place.partition, record.offset, record.timestamp, record.key or b"", record.value or b""
                )
            if reached > position:
                position, moved = reached, time.monotonic()
            elif time.monotonic() - moved > self._config.request_timeout_s:
                silence = kafka_errors.KafkaTimeoutError("no progress")
                raise self._explained(silence, "read", resource, place.topic)


class _Exists(Exception):  # noqa: N818  not an error: somebody else has just made the topic
    """The topic is there already."""


def _checked(answer: dict[TopicPartition, type[kafka_errors.KafkaError]]) -> dict[TopicPartition, Any]:
    """Commits whose errors come as a map, raised."""
    for error in answer.values():
        if error is not kafka_errors.NoError:
            raise error()
    return answer


def _too_large(topic: str, size: int, limit: str) -> RecordTooLargeError:
    return RecordTooLargeError(
        f"an entry of {size} bytes for topic {topic!r} is over {limit}",
        mend="keep less of each request, or raise max_record_bytes and the topic's max.message.bytes together",
    )


def _close_reader(reader: KafkaConsumer) -> None:
    try:
        reader.close(autocommit=False)
    except kafka_errors.KafkaError:  # its connections are closed first
        return

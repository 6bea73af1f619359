"""The capture log's protocol and its in-memory twin: topics, partitions, offsets, explicit commits."""

from __future__ import annotations

import threading
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from draftloop.pipeline.errors import InputError, MissingTopicError


class LogEntry(NamedTuple):
    """What a producer hands in. The key picks the partition: equal keys keep their order."""

    key: bytes
    value: bytes


class StoredEntry(NamedTuple):
    """What a reader gets back."""

    partition: int
    offset: int
    time_ms: int
    key: bytes
    value: bytes


Offsets = dict[int, int]  # partition -> next offset


class CaptureLog(Protocol):
    """A durable stream. Offsets are dense per partition, start at 0 and are never reused.

    Old entries may expire: they leave gaps at the low end, never in the numbering. Every method may raise BrokerError.
    """

    def create_topic(self, topic: str, *, num_partitions: int) -> None:
        """Make a topic; an existing one with the same partition count is left as it is. Raises InputError otherwise."""

    def topics(self) -> dict[str, int]:
        """Topic -> number of partitions."""

    def topic_id(self, topic: str) -> str:
        """What a topic of that name made anew does not have in common with this one. Raises MissingTopicError."""

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        """Append durably. Raises MissingTopicError, StorageError (nothing arrived), AppendError (tells what not)."""

    def start_offsets(self, topic: str) -> Offsets:
        """The offset of each partition's oldest entry that is still there; the end offset where none is."""

    def end_offsets(self, topic: str) -> Offsets:
        """The next offset of each partition."""

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
        """Entries with start <= offset < stop, in order, streamed."""

    def committed(self, group: str, topic: str) -> Offsets:
        """What a group has committed; partitions never committed are at 0."""

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Store a group's progress durably."""

    def close(self) -> None:
        """Release the log; appended entries stay."""


def partition_of(key: bytes, num_partitions: int) -> int:
    """The partition of a key, equal in every process."""
    return zlib.crc32(key) % num_partitions


def unknown_topic(topic: str, known: Sequence[str]) -> MissingTopicError:
    """The one wording for a topic that is not there."""
    there = ", ".join(sorted(known)) or "none"
    return MissingTopicError(
        f"no topic {topic!r} in the log (it has: {there})", mend="create it first (Kafka: `draftloop access apply`)"
    )


def require_partitions(topic: str, wanted: int, known: int | None = None) -> None:
    """What create_topic may be asked for. Raises InputError: less than one partition, or not as many as are known."""
    if wanted < 1:
        raise InputError(f"topic {topic!r} with {wanted} partitions", mend="give it at least one")
    if known not in (None, wanted):
        raise InputError(
            f"topic {topic!r} has {known} partitions, not {wanted}",
            mend="use that count, or a topic of another name: a key's partition must not change",
        )


class MemoryLog:
    """The in-memory twin: same contract, gone with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: dict[str, list[list[StoredEntry]]] = {}
        self._ids: dict[str, str] = {}
        self._committed: dict[tuple[str, str], Offsets] = {}
        self._clock_ms = 0

    def create_topic(self, topic: str, *, num_partitions: int) -> None:
        with self._lock:
            known = self._topics.get(topic)
            require_partitions(topic, num_partitions, None if known is None else len(known))
            self._topics.setdefault(topic, [[] for _ in range(num_partitions)])
            self._ids.setdefault(topic, uuid.uuid4().hex)

    def topics(self) -> dict[str, int]:
        with self._lock:
            return {topic: len(partitions) for topic, partitions in self._topics.items()}

    def topic_id(self, topic: str) -> str:
        with self._lock:
            self._partitions(topic)
            return self._ids[topic]

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        with self._lock:
            partitions = self._partitions(topic)
            for entry in entries:
                self._clock_ms += 1
                index = partition_of(entry.key, len(partitions))
                stored = StoredEntry(index, len(partitions[index]), self._clock_ms, entry.key, entry.value)
                partitions[index].append(stored)

    def start_offsets(self, topic: str) -> Offsets:
        with self._lock:
            return {index: 0 for index, _ in enumerate(self._partitions(topic))}

    def end_offsets(self, topic: str) -> Offsets:
        with self._lock:
            return {index: len(entries) for index, entries in enumerate(self._partitions(topic))}

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
        with self._lock:
            window = self._partitions(topic)[partition][start:stop]
        yield from window

    def committed(self, group: str, topic: str) -> Offsets:
        with self._lock:
            known = self._committed.get((group, topic), {})
            return {index: known.get(index, 0) for index in range(len(self._partitions(topic)))}

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        with self._lock:
            self._partitions(topic)
            self._committed.setdefault((group, topic), {}).update(offsets)

    def close(self) -> None:
        pass

    def _partitions(self, topic: str) -> list[list[StoredEntry]]:
        if topic not in self._topics:
            raise unknown_topic(topic, list(self._topics))
        return self._topics[topic]

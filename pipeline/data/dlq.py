"""Poison records: entries no reader could decode, copied with their reason to a topic of their own, never dropped.

The copy is made from a published snapshot's ledger, so it can be made again: what lies in the topic already is not
copied twice, and a key says which entry it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from draftloop.pipeline.data.curate import Window
from draftloop.pipeline.data.snapshot import Reject
from draftloop.pipeline.errors import AppendError, StorageError, UndecodableRecordError
from draftloop.pipeline.stream.log import CaptureLog, LogEntry, StoredEntry

POISON = frozenset({"undecodable", "newer_schema"})
BATCH = 256  # entries an append
MAX_BATCH_BYTES = 4 << 20
MAX_GAP = 256  # offsets: poison records this near to each other are fetched by one read
SHORT_KEY_BYTES = 64  # of a letter that did not fit
PAGE = 4096  # offsets marked in one piece of memory


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A poison record and where it was found. Where it did not fit: `value` is None, of `key` only the beginning."""

    reason: str
    topic: str
    topic_id: str  # a topic made anew has other entries at the same places
    partition: int
    offset: int
    time_ms: int
    key: bytes
    value: bytes | None

    @property
    def name(self) -> bytes:
        """The key it lies under: equal for equal places in the log."""
        return f"{self.topic}/{self.partition}/{self.offset}".encode()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(DeadLetter)
_WRONG = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)


def poison(log: CaptureLog, rejects: Iterable[Reject], window: Window) -> Iterator[DeadLetter]:
    """The entries of the window that the ledger (ordered by place) calls undecodable or of a newer schema.

    What has expired since is left out. Streamed.
    """
    topic_id: str | None = None
    for group in _near(_poisoned(rejects)):
        topic_id = topic_id or log.topic_id(window.topic)
        reasons = {place.offset: place.reason for place in group}
        for entry in log.read(window.topic, group[0].partition, group[0].offset, group[-1].offset + 1):
            if entry.offset in reasons:
                yield _letter(entry, reasons[entry.offset], window.topic, topic_id)


def dead_letter(log: CaptureLog, rejects: Iterable[Reject], window: Window, *, to: str) -> int:
    """Copy the window's poison records to the topic `to` (which must exist); returns how many were not there before.

    Raises MissingTopicError, StorageError, BrokerError.
    """
    there: _Places | None = None
    num_sent = 0
    for batch in _batches(poison(log, rejects, window)):
        there = there or _already(log, window, to)  # windows without poison do not read the topic
        fresh = [letter for letter in batch if letter not in there]
        _append(log, to, fresh)
        num_sent += len(fresh)
    return num_sent


def read_dead_letters(log: CaptureLog, topic: str) -> Iterator[DeadLetter]:
    """Everything in a dead-letter topic, partition by partition. Raises MissingTopicError, UndecodableRecordError."""
    starts = log.start_offsets(topic)
    for partition, stop in log.end_offsets(topic).items():
        for entry in log.read(topic, partition, starts[partition], stop):
            try:
                yield _decoder.decode(entry.value)
            except _WRONG as error:
                raise UndecodableRecordError(
                    f"{topic} partition {partition} offset {entry.offset} is not a dead letter: {error}",
                    mend="find out who else may write this topic: `draftloop access verify`",
                ) from error


class _Place(NamedTuple):
    partition: int
    offset: int
    reason: str


def _poisoned(rejects: Iterable[Reject]) -> Iterator[_Place]:
    for reject in rejects:
        partition, offset = reject.partition, reject.offset
        if reject.reason in POISON and partition is not None and offset is not None:  # rejects of a window have a place
            yield _Place(partition, offset, reject.reason)


class _Places:
    """A set of offsets of a window, a bit each, in pages: neither much poison nor a long gap makes it large."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._pages: dict[tuple[int, int], bytearray] = {}

    def __contains__(self, letter: DeadLetter) -> bool:
        page = self._pages.get((letter.partition, letter.offset // PAGE))
        return page is not None and bool(page[letter.offset % PAGE // 8] & 1 << letter.offset % 8)

    def add(self, partition: int, offset: int) -> None:
        """Mark a place; one outside the window is none of ours."""
        if self._window.start.get(partition, 0) <= offset < self._window.stop.get(partition, 0):
            page = self._pages.setdefault((partition, offset // PAGE), bytearray(PAGE // 8))
            page[offset % PAGE // 8] |= 1 << offset % 8


def _already(log: CaptureLog, window: Window, topic: str) -> _Places:
    """The places of the window that the topic has letters of: a foreign entry there stops nothing and hides nothing."""
    found = _Places(window)
    topic_id = log.topic_id(window.topic)
    beginning = f"{window.topic}/".encode()
    starts = log.start_offsets(topic)
    for number, stop in log.end_offsets(topic).items():
        for entry in log.read(topic, number, starts[number], stop):
            letter = _letter_in(entry) if entry.key.startswith(beginning) else None
            if letter is not None and (letter.topic, letter.topic_id) == (window.topic, topic_id):
                found.add(letter.partition, letter.offset)
    return found


def _letter_in(entry: StoredEntry) -> DeadLetter | None:
    try:
        return _decoder.decode(entry.value)
    except _WRONG:
        return None


def _near(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    """Runs of places that one read of the log can fetch."""
    group: list[_Place] = []
    for place in places:
        if group and not _fits(group, place):
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _fits(group: list[_Place], place: _Place) -> bool:
    last = group[-1]
    return place.partition == last.partition and len(group) < BATCH and place.offset - last.offset <= MAX_GAP


def _letter(entry: StoredEntry, reason: str, topic: str, topic_id: str) -> DeadLetter:
    return DeadLetter(
        reason=reason,
        topic=topic,
        topic_id=topic_id,
        partition=entry.partition,
        offset=entry.offset,
        time_ms=entry.time_ms,
        key=entry.key,
        value=entry.value,
    )


def _batches(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    batch: list[DeadLetter] = []
    size = 0
    for letter in letters:
        batch.append(letter)
        size += len(letter.key) + len(letter.value or b"")
        if len(batch) == BATCH or size >= MAX_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _append(log: CaptureLog, topic: str, letters: list[DeadLetter]) -> None:
    """Append; what the log refuses for its size is noted without its value and with a short key."""
    try:
        log.append(topic, [_entry(letter) for letter in letters])
    except AppendError as error:
        if error.failed:
            raise StorageError(
                f"{len(error.failed)} of {len(letters)} dead letters did not reach {topic!r}: "
                f"{next(iter(error.failed.values())).message}",
                mend="run the same command again: what arrived is not sent twice",
            ) from error
        log.append(topic, [_entry(_shortened(letters[index])) for index in error.refused])


def _shortened(letter: DeadLetter) -> DeadLetter:
    return msgspec.structs.replace(letter, value=None, key=letter.key[:SHORT_KEY_BYTES])


def _entry(letter: DeadLetter) -> LogEntry:
    return LogEntry(letter.name, _encoder.encode(letter))

"""One entry of the log on its own: decoded, checked, spilled, and what the decisions between entries need of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from draftloop.pipeline.data.mixture import is_heldout, rank
from draftloop.pipeline.data.packed import PackedRow, encode_row, pack_temperature
from draftloop.pipeline.data.snapshot import SPLITS, Snapshot, Split
from draftloop.pipeline.data.spill import Spill
from draftloop.pipeline.errors import NewerSchemaError, UndecodableRecordError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.records import CapturedRequest, decode
from draftloop.pipeline.stream.log import CaptureLog, StoredEntry

if TYPE_CHECKING:
    from draftloop.pipeline.data.curate import CurateConfig, Reason, Window


# Texts beyond these are no ids and labels: they would fill the index, the ledger and every row that quotes them.
MAX_ID_BYTES = 512
MAX_SLICES = 32
MAX_SLICES_BYTES = 4096  # names and values together
MAX_LABEL_CHARS = 64  # of a slice that old rows are spread over: all of its values are held at once


class IndexEntry(NamedTuple):
    """What is known of one offset of the window, or of a run of them. Fields are None from where it was rejected on."""

    partition: int
    offset: int
    reason: Reason | None  # None: a candidate, whose row lies in the spill
    record_id: str | None = None
    rank: bytes | None = None  # place in the order of rows; equal for equal record ids
    digest: bytes | None = None  # of the whole entry: of two with one record id the smaller is kept
    side: Split | None = None
    content: bytes | None = None
    tenant: str | None = None
    policy: str | None = None
    conversation: str | None = None
    place: int | None = None
    size: int | None = None
    num_offsets: int = 1  # offsets from `offset` on: over 1 only where the log has none of them


class ParentRow(NamedTuple):
    """What is known of one row of the parent snapshot."""

    side: Split
    position: int
    rank: bytes
    content: bytes
    replay: bytes  # the order in which old rows are chosen
    slice: str
    conversation: str


class Examiner:
    """The rules for one record alone. Permission is asked before content is looked at."""

    def __init__(self, fingerprint: Fingerprint, config: CurateConfig, spill: Spill) -> None:
        self._target = fingerprint.digest  # computed anew at each reading of the property
        self._vocab_size = fingerprint.vocab_size
        self._config = config
        self._spill = spill
        self._order_salt = f"{config.split_salt}/order"
        self._replay_salt = f"{config.split_salt}/replay"

    def window(self, log: CaptureLog, window: Window) -> Iterator[IndexEntry]:
        """Every offset of the window once, ordered by partition and offset; rows of candidates go into the spill.

        Offsets that follow each other and are not in the log are one entry: retention may have taken billions.
        """
        for partition, stop in sorted(window.stop.items()):
            expected = window.start.get(partition, 0)
            for entry in log.read(window.topic, partition, expected, stop):
                if entry.offset > expected:
                    yield IndexEntry(partition, expected, "missing", num_offsets=entry.offset - expected)
                expected = entry.offset + 1
                yield self._examined(entry)
            if stop > expected:
                yield IndexEntry(partition, expected, "missing", num_offsets=stop - expected)

    def parent(self, carried: Snapshot) -> Iterator[ParentRow]:
        """Every row of the parent snapshot. Raises SnapshotError."""
        slice_key = self._config.replay_slice
        for side in SPLITS:
            for position, row in enumerate(carried.packed_rows(side)):
                yield ParentRow(
                    side,
                    position,
                    rank(self._order_salt, row.record_id),
                    _content(row),
                    rank(self._replay_salt, row.record_id),
                    dict(row.slices).get(slice_key, "")[:MAX_LABEL_CHARS],
                    row.conversation_id,
                )

    def _examined(self, entry: StoredEntry) -> IndexEntry:
        try:
            record = decode(entry.value)
        except NewerSchemaError:
            return IndexEntry(entry.partition, entry.offset, "newer_schema")
        except UndecodableRecordError:
            return IndexEntry(entry.partition, entry.offset, "undecodable")
        # Another salt than the split's: the order must not follow the split where record and conversation ids coincide.
        order = rank(self._order_salt, record.record_id)
        digest = hashlib.sha256(entry.value).digest()
        reason = self._reason(record)
        if reason is not None:
            name = record.record_id if _num_bytes(record.record_id) <= MAX_ID_BYTES else None
            return IndexEntry(entry.partition, entry.offset, reason, name, order, digest)
        config = self._config
        conversation = record.conversation_id
        side = SPLITS[is_heldout(config.split_salt, conversation, config.heldout_fraction)]
        place, size = self._spill.add(side, order, encode_row(_row(record)))
        return IndexEntry(
            entry.partition,
            entry.offset,
            None,
            record.record_id,
            order,
            digest,
            side,
            _content(record),
            record.tenant,
            record.consent.policy_version,
            conversation,
            place,
            size,
        )

    def _reason(self, record: CapturedRequest) -> Reason | None:
        """The first reason why a record has no row."""
        config = self._config
        if record.consent.purpose != "train":
            return "no_consent"
        if record.target != self._target:
            return "other_target"
        if _is_oversize(record):
            return "oversize_field"
        if record.finish_reason == "abort" and not config.train_on_aborted:
            return "aborted"
        logprobs = record.logprobs or b""
        if len(record.prompt_ids) % 4 or len(record.output_ids) % 4 or len(logprobs) % 4:
            return "undecodable"
        num_prompt, num_output = len(record.prompt_ids) // 4, len(record.output_ids) // 4
        if not num_prompt:
            return "no_prompt"
        if not num_output:
            return "no_output"
        if num_output < config.min_output_tokens:
            return "too_short"
        if num_output > config.max_output_tokens or num_prompt + num_output > config.max_sequence_tokens:
            return "too_long"
        if np.frombuffer(record.prompt_ids + record.output_ids, "<u4").max() >= self._vocab_size:
            return "id_out_of_vocabulary"
        if logprobs and (len(logprobs) != 4 * num_output or not np.isfinite(np.frombuffer(logprobs, "<f4")).all()):
            return "logprobs_mismatch"
        return None


def _is_oversize(record: CapturedRequest) -> bool:
    """Whether a text that curation keeps is too long."""
    names = (
        record.record_id,
        record.conversation_id,
        record.tenant,
        record.subject,
        record.consent.policy_version,
    )
    if any(_num_bytes(name) > MAX_ID_BYTES for name in names) or len(record.slices) > MAX_SLICES:
        return True
    return sum(_num_bytes(name) + _num_bytes(value) for name, value in record.slices.items()) > MAX_SLICES_BYTES


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _row(record: CapturedRequest) -> PackedRow:
    return PackedRow(
        record.record_id,
        record.conversation_id,
        record.prompt_ids,
        record.output_ids,
        tuple(sorted(record.slices.items())),
        pack_temperature(record.sampling.temperature),
        record.logprobs or b"",
    )


def _content(row: CapturedRequest | PackedRow) -> bytes:
    # The length first: else a longer prompt and a shorter output could look the same.
    digest = hashlib.sha256((len(row.prompt_ids) // 4).to_bytes(8, "little"))
    digest.update(row.prompt_ids)
    digest.update(row.output_ids)
    return digest.digest()

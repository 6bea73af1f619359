"""From a window of log offsets to the rows of a snapshot: decode, check, deduplicate, split, mix in old rows.

Nothing here depends on the clock, on how partitions interleave, or on who reads first: the same entries and the same
rules give the same rows in the same order. Every entry of the window becomes a row or a reject with one reason.

Memory stays flat: the first pass streams the window, leaves each good row in files on disk (spill) and a line about
every entry in an index (curate_index); all decisions between entries are made on the index; the second pass streams
the rows in their order into the snapshot.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from draftloop.pipeline import artifact
from draftloop.pipeline.data.mixture import replay_rows
from draftloop.pipeline.data.packed import encode_row
from draftloop.pipeline.data.snapshot import (
    SPLITS,
    PackedSplit,
    Reject,
    Snapshot,
    Split,
    on_both_sides,
    publish_packed,
)
from draftloop.pipeline.data.spill import Spill
from draftloop.pipeline.errors import ConfigError, EmptySnapshotError, InputError, StorageError
from draftloop.pipeline.fingerprint import Fingerprint, require_same
from draftloop.pipeline.stream.log import CaptureLog, Offsets

if TYPE_CHECKING:
    from draftloop.pipeline.data.candidate import IndexEntry
    from draftloop.pipeline.data.curate_index import Chosen, CurationIndex

Progress = Callable[[int, int], None]
Reason = Literal[
    "missing",  # the log gave no entry for this offset: erased or expired
    "undecodable",
    "newer_schema",
    "duplicate_record",  # the same record id again: a redelivery
    "no_consent",  # kept for another purpose than training
    "other_target",
    "oversize_field",  # an id over 512 bytes, or slices over 32 or over 4 KiB together
    "aborted",
    "no_prompt",
    "no_output",
    "too_short",
    "too_long",
    "id_out_of_vocabulary",
    "logprobs_mismatch",  # not one finite value per output token
    "duplicate_content",  # the same prompt and output under another record id
    "seen_in_training",  # would be held out, but the parent was trained on the same content
    "seen_in_heldout",  # would be trained on, but the parent holds the same content out
    "tenant_cap",
]
SPLIT_RULE = "heldout when sha256(salt NUL conversation_id)[:8] >> 11 < fraction * 2^53"


class CurateConfig(BaseModel):
    """Rules by which captured requests become rows. All of them enter the snapshot's id."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_output_tokens: int = Field(4, ge=1)
    max_output_tokens: int = Field(4096, ge=1)
    max_sequence_tokens: int = Field(4096, ge=2)  # prompt and output together
    heldout_fraction: float = Field(0.15, gt=0, lt=1)
    split_salt: str = Field("draftloop", min_length=1)
    train_on_aborted: bool = False
    max_rows_per_tenant: int | None = Field(None, ge=1)
    replay_share: float = Field(0.35, ge=0, lt=1)  # of the new training side, taken from the parent's
    replay_slice: str = "domain"  # replayed rows are spread evenly over this slice's values
    max_carried_heldout: int = Field(2000, ge=0)

    def split_rule(self) -> dict[str, Any]:
        """The settings that must not change between a snapshot and its child."""
        return {"split_salt": self.split_salt, "heldout_fraction": self.heldout_fraction}


@dataclass(frozen=True)
class Window:
    """A part of a topic: start[p] <= offset < stop[p] for every partition p of `stop`."""

    topic: str
    start: Offsets
    stop: Offsets

    @property
    def num_entries(self) -> int:
        """Offsets in the window."""
        return sum(stop - self.start.get(partition, 0) for partition, stop in self.stop.items())


class Counts(TypedDict):
    """The ledger of one curation: captured == kept + sum(rejected). Carried rows come from the parent on top."""

    captured: int
    kept: int
    rejected: dict[str, int]
    carried: dict[str, int]


class Curated:
    """A decided window on disk, ready to publish: good inside the `curate` block, its rows to be read once."""

    def __init__(
        self, index: CurationIndex, spill: Spill, *, counts: Counts, source: dict[str, Any], rules: dict[str, Any]
    ) -> None:
        self.counts = counts
        self.source = source
        self.rules = rules
        self._index = index
        self._spill = spill

    @property
    def num_rows(self) -> int:
        """Rows to be written, old ones included."""
        return self.counts["kept"] + sum(self.counts["carried"].values())

    def splits(self) -> dict[Split, PackedSplit]:
        """Both sides, to be streamed. Raises SnapshotError where a conversation is on both."""
        conversations = self._index.conversations()
        if conversations.shared is not None:
            raise on_both_sides(conversations.shared, conversations.num_shared)
        kept, carried = self._index.num_kept(), self._index.num_carried()
        return {
            side: PackedSplit(
                self._rows(side),
                kept[side] + carried[side],
                conversations.num_by_side[side],
            )
            for side in SPLITS
        }

    def rejects(self) -> Iterator[Reject]:
        """Every reject, ordered by its place in the log."""
        return self._index.rejects()

    def _rows(self, side: Split) -> Iterator[bytes]:
        yield from self._spill.take(side, self._index.rows(side))  # the sort begins when the first row is asked for


def pending_window(log: CaptureLog, topic: str, group: str) -> Window:
    """What a group has not yet committed; all that is still there for a group that never did.

    Raises MissingTopicError, and InputError where the group has committed more than the topic holds.
    """
    committed, ends = log.committed(group, topic), log.end_offsets(topic)
    for partition, offset in committed.items():
        if offset > ends.get(partition, 0):
            raise InputError(
                f"group {group!r} has committed offset {offset} of partition {partition} of {topic!r}, which ends at "
                f"{ends.get(partition, 0)}: the topic was made anew",
                mend="set the group's offsets back to 0 (Kafka: kafka-consumer-groups.sh --reset-offsets "
                "--to-earliest), or give the target a topic of another name",
            )
    # Of a topic that has expired entries a new group would else report millions as missing.
    return Window(topic, committed if any(committed.values()) else log.start_offsets(topic), ends)


@contextmanager
def curate(
    log: CaptureLog,
    window: Window,
    *,
    beside: Path,
    fingerprint: Fingerprint,
    config: CurateConfig,
    carried: Snapshot | None = None,
    on_progress: Progress | None = None,
) -> Iterator[Curated]:
    """Decide a window into train and held-out rows, replaying a share of the parent snapshot `carried`.

    What is kept on disk for the block lies in a staging folder in `beside` (where snapshots go), about as large as the
    window. `on_progress(done, total)` is called about every 256 entries and at the end. Raises InputError (window not
    in the log), ConfigError (split rule changed since the parent), FingerprintMismatchError (parent of another
    target), StorageError.
    """
    from draftloop.pipeline.data.candidate import Examiner
    from draftloop.pipeline.data.curate_index import CurationIndex

    _check_window(log, window)
    if carried is not None:
        _check_parent(carried, fingerprint, config)
    with artifact.staging(beside / "curation") as folder:
        try:
            spill = Spill(folder / "rows", num_rows=window.num_entries)
            with closing(spill), closing(CurationIndex(folder / "index.sqlite")) as index:
                examiner = Examiner(fingerprint, config, spill)
                if carried is not None:
                    index.add_parent(examiner.parent(carried))
                index.add_entries(_counted(examiner.window(log, window), window.num_entries, on_progress))
                index.decide(config.max_rows_per_tenant)
                if carried is not None:
                    _carry(carried, index, spill, config)
                yield _decided(index, spill, window, config, carried)
        except sqlite3.Error as error:
            raise StorageError(
                f"curation index {folder / 'index.sqlite'}: {error}",
                mend="free disk space there and where SQLite keeps temporary files; nothing was published",
            ) from error


def publish_curated(
    root: Path, curated: Curated, *, fingerprint: Fingerprint, on_progress: Progress | None = None
) -> Snapshot:
    """Publish curated rows; `on_progress(done, total)` counts them.

    Raises EmptySnapshotError also where only carried rows are left, SnapshotError, StorageError.
    """
    if not curated.counts["kept"]:
        ledger = ", ".join(f"{reason} {count}" for reason, count in curated.counts["rejected"].items()) or "none"
        raise EmptySnapshotError(
            f"no entry of the window became a row ({curated.counts['captured']} captured; rejected: {ledger})",
            mend="loosen the rule with the largest count, or capture more traffic",
        )
    return publish_packed(
        root,
        curated.splits(),
        rejects=curated.rejects(),
        rejected=curated.counts["rejected"],
        fingerprint=fingerprint,
        source=curated.source,
        rules=curated.rules,
        on_progress=on_progress,
    )


def _check_window(log: CaptureLog, window: Window) -> None:
    ends = log.end_offsets(window.topic)
    for partition, stop in window.stop.items():
        start = window.start.get(partition, 0)
        if partition not in ends or not 0 <= start <= stop <= ends[partition]:
            raise InputError(
                f"window {start}..{stop} of partition {partition}: topic {window.topic!r} has "
                f"{f'0..{ends[partition]}' if partition in ends else 'no such partition'}",
                mend="give offsets that are in the log",
            )


def _check_parent(carried: Snapshot, fingerprint: Fingerprint, config: CurateConfig) -> None:
    require_same(fingerprint, carried.fingerprint, expected_of="this run", found_of=f"snapshot {carried.id}")
    wanted = config.split_rule()
    found = {name: carried.manifest["rules"].get(name) for name in wanted}
    if found != wanted:
        raise ConfigError(
            f"snapshot {carried.id} was split by {found}, this run splits by {wanted}",
            mend="keep heldout_fraction and split_salt for all cycles, or start without a parent snapshot",
        )


def _counted(entries: Iterator[IndexEntry], total: int, on_progress: Progress | None) -> Iterator[IndexEntry]:
    done = 0
    for entry in entries:
        yield entry
        before, done = done, done + entry.num_offsets
        if on_progress is not None and (done // 256 > before // 256 or done == total):
            on_progress(done, total)


def _carry(carried: Snapshot, index: CurationIndex, spill: Spill, config: CurateConfig) -> None:
    """Choose rows of the parent and put them into the spill."""
    num_kept = index.num_kept()
    totals: dict[Split, int] = {
        "train": replay_rows(num_kept["train"], config.replay_share),
        "heldout": config.max_carried_heldout,
    }
    for side, total in totals.items():
        index.add_carried(side, _spilled(carried, side, index.choose(side, total), spill))


def _spilled(
    carried: Snapshot, side: Split, chosen: Iterator[Chosen], spill: Spill
) -> Iterator[tuple[Chosen, int, int]]:
    """The chosen rows, which come by position, found by streaming the parent beside them."""
    rows = enumerate(carried.packed_rows(side))
    for choice in chosen:
        packed = next(row for position, row in rows if position == choice.position)
        yield choice, *spill.add(side, choice.rank, encode_row(packed))


def _decided(
    index: CurationIndex, spill: Spill, window: Window, config: CurateConfig, carried: Snapshot | None
) -> Curated:
    kept, rejected = sum(index.num_kept().values()), index.num_rejected()
    counts: Counts = {
        "captured": kept + sum(rejected.values()),
        "kept": kept,
        "rejected": rejected,
        "carried": {side: count for side, count in index.num_carried().items()},
    }
    assert counts["captured"] == window.num_entries
    parent = carried.id if carried is not None else None
    source = {
        "topic": window.topic,
        "offsets": {str(p): [window.start.get(p, 0), stop] for p, stop in sorted(window.stop.items())},
        "consent_policies": index.num_by_policy(),
        "captured": counts["captured"],
        "kept": kept,
        "carried": counts["carried"],
        "parent": parent,
    }
    rules = {**config.model_dump(mode="json"), "split_rule": SPLIT_RULE, "parent": parent}
    return Curated(index, spill, counts=counts, source=source, rules=rules)

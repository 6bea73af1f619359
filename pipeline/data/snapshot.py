"""Frozen, content-addressed datasets: rows as `datasets` Arrow folders, reject ledger, manifest, completion marker.

Layout of `root/<id>/`: `train/` and `heldout/` (what `datasets.load_from_disk` reads), `rejects.jsonl`,
`manifest.json`, `COMPLETE`. Everything is written as a stream: memory does not grow with the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from draftloop.pipeline import artifact
from draftloop.pipeline.data.packed import PackedRow, finish_folder, pack, read_folder, unpack_batch, write_folder
from draftloop.pipeline.errors import EmptySnapshotError, SnapshotError
from draftloop.pipeline.fingerprint import Fingerprint

SNAPSHOT_SCHEMA = 1
REJECTS = "rejects.jsonl"
MAKE_AGAIN = "make the snapshot again (curate the same window) or restore it from a copy; nothing was changed"

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


class Row(NamedTuple):
    """One request as training and judging see it. `logprobs` is empty or has one float32 per output token."""

    record_id: str
    conversation_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    slices: dict[str, str]
    temperature: float
    logprobs: list[float]


class Reject(NamedTuple):
    """Why an entry did not become a row: its place in the log and its record id, where known; never any content.

    A run of entries that are gone from the log is one reject: `num_offsets` offsets, `offset` being the first.
    """

    reason: str
    partition: int | None
    offset: int | None
    record_id: str | None
    num_offsets: int = 1


class PackedSplit(NamedTuple):
    """One side of a snapshot to be written: packed rows (data.packed) in their order, and how many they are."""

    rows: Iterable[bytes]
    num_rows: int
    num_conversations: int


@dataclass(frozen=True)
class Snapshot:
    """An opened snapshot: every file's digest was checked."""

    folder: Path
    id: str
    manifest: dict[str, Any]
    fingerprint: Fingerprint

    def batches(self, split: Split) -> Iterator[Any]:
        """One side as Arrow record batches, in the snapshot's own order, one in memory at a time.

        Raises SnapshotError.
        """
        with self._errors(split):
            yield from read_folder(self.folder / split)

    def packed_rows(self, split: Split) -> Iterator[PackedRow]:
        """One side in canonical form, streamed as `batches`. Raises SnapshotError."""
        for batch in self.batches(split):
            with self._errors(split):
                rows = unpack_batch(batch)
            yield from rows

    def rows(self, split: Split) -> list[Row]:
        """All rows of one side in memory, in the snapshot's own order. Raises SnapshotError."""
        found: list[Row] = []
        for batch in self.batches(split):
            with self._errors(split):
                columns = [batch.column(name).to_pylist() for name in Row._fields]
                texts = Row._fields.index("slices")
                columns[texts] = [json.loads(text) for text in columns[texts]]
            found += (Row(*values) for values in zip(*columns, strict=True))
        return found

    @contextmanager
    def _errors(self, split: Split) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError) as error:
            raise SnapshotError(f"snapshot {self.folder}: {split}/ does not load: {error}", mend=MAKE_AGAIN) from error


def publish_snapshot(
    root: Path,
    *,
    train: Sequence[Row],
    heldout: Sequence[Row],
    rejects: Sequence[Reject],
    fingerprint: Fingerprint,
    source: Mapping[str, Any],
    rules: Mapping[str, Any],
) -> Snapshot:
    """Write rows in memory as a snapshot; otherwise as `publish_packed`. Raises EmptySnapshotError, SnapshotError."""
    _require_disjoint(train, heldout)
    rejected: Counter[str] = Counter()
    for reject in rejects:
        rejected[reject.reason] += reject.num_offsets
    splits: dict[Split, PackedSplit] = {
        split: PackedSplit(map(pack, rows), len(rows), len({row.conversation_id for row in rows}))
        for split, rows in zip(SPLITS, (train, heldout), strict=True)
    }
    return publish_packed(
        root,
        splits,
        rejects=sorted(rejects, key=_place),
        rejected=dict(sorted(rejected.items())),
        fingerprint=fingerprint,
        source=source,
        rules=rules,
    )


def publish_packed(
    root: Path,
    splits: Mapping[Split, PackedSplit],
    *,
    rejects: Iterable[Reject],
    rejected: Mapping[str, int],
    fingerprint: Fingerprint,
    source: Mapping[str, Any],
    rules: Mapping[str, Any],
    on_progress: Callable[[int, int], None] | None = None,
) -> Snapshot:
    """Write a snapshot to `root/<id>`; the same content a second time changes nothing and returns the same.

    `source` says where the rows came from (topic, offset ranges, consent policy versions, parent); `rules` how they
    were chosen and split; `rejects` come ordered by place. A damaged folder of the same id is replaced.
    `on_progress(done, total)` counts rows. Raises EmptySnapshotError, SnapshotError, StorageError.
    """
    num_rows = {split: splits[split].num_rows for split in SPLITS}
    for split in SPLITS:
        if not num_rows[split]:
            raise _empty_snapshot(split, num_other=sum(num_rows.values()), reasons=rejected)
    digest = _IdDigest(fingerprint, rules, sum(num_rows.values()), on_progress)
    with artifact.staging(root / "snapshot") as draft:
        num_tokens = {
            split: write_folder(draft / split, digest.passing(split, splits[split].rows, num_rows[split]))
            for split in SPLITS
        }
        identity = digest.hexdigest()
        final = root / identity
        if artifact.is_complete(final):
            try:
                return open_snapshot(final)
            except SnapshotError:
                (final / artifact.MARKER).unlink()  # damaged: without its marker, `publish` below replaces it
        for split in SPLITS:
            finish_folder(draft / split, f"{identity}-{split}")
        _write_rejects(draft / REJECTS, rejects)
        manifest = {
            "kind": "snapshot",
            "schema": SNAPSHOT_SCHEMA,
            "id": identity,
            "fingerprint": fingerprint.to_dict(),
            "source": dict(source),
            "rules": dict(rules),
            "counts": {
                "rows": num_rows,
                "output_tokens": num_tokens,
                "conversations": {split: splits[split].num_conversations for split in SPLITS},
                "rejected": dict(rejected),
            },
        }
        artifact.publish(draft, final, manifest)
    return open_snapshot(final)


def open_snapshot(folder: Path) -> Snapshot:
    """Open a snapshot after checking every file's digest. Raises SnapshotError naming the file and the mend."""
    try:
        manifest = artifact.verify(folder, kind="snapshot", error=SnapshotError)
        if manifest.get("kind") != "snapshot":
            raise SnapshotError(f"{folder} is a {manifest.get('kind')}, not a snapshot", mend="check the path")
        if manifest["schema"] > SNAPSHOT_SCHEMA:
            raise SnapshotError(
                f"snapshot {folder} has schema {manifest['schema']}, this draftloop reads up to {SNAPSHOT_SCHEMA}",
                mend="upgrade draftloop on this side",
            )
        fingerprint = Fingerprint.from_dict(manifest["fingerprint"])
    except (OSError, ValueError, KeyError, msgspec.ValidationError) as error:
        raise SnapshotError(f"snapshot {folder}: manifest is not readable: {error}", mend=MAKE_AGAIN) from error
    return Snapshot(folder=folder, id=manifest["id"], manifest=manifest, fingerprint=fingerprint)


def read_rejects(snapshot: Snapshot) -> Iterator[Reject]:
    """The reject ledger of an opened snapshot, ordered by place, a line in memory at a time. Raises OSError."""
    with (snapshot.folder / REJECTS).open("rb") as stream:
        for line in stream:
            yield Reject(**json.loads(line))


class _IdDigest:
    """Name of a content: 32 hex digits of a sha256 over rows, rules and fingerprint; no clock, no offsets."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        rules: Mapping[str, Any],
        total: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        header = {"schema": SNAPSHOT_SCHEMA, "fingerprint": fingerprint.digest, "rules": dict(rules)}
        self._digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        self._done, self._total, self._on_progress = 0, total, on_progress

    def passing(self, split: Split, rows: Iterable[bytes], num_rows: int) -> Iterator[bytes]:
        """The rows of a side, hashed as they pass."""
        self._digest.update(f"\n{split} {num_rows}\n".encode())
        before = self._done
        for raw in rows:
            self._digest.update(raw)
            self._done += 1
            if self._on_progress is not None and (self._done % 256 == 0 or self._done == self._total):
                self._on_progress(self._done, self._total)
            yield raw
        assert self._done - before == num_rows, f"{split}: {self._done - before} rows came, {num_rows} were announced"

    def hexdigest(self) -> str:
        return self._digest.hexdigest()[:32]


def _empty_snapshot(split: str, *, num_other: int, reasons: Mapping[str, int]) -> EmptySnapshotError:
    """The one wording for a side without rows: an all-rejected run is an error, never an empty dataset."""
    ledger = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())) or "none"
    side = "no rows to train on" if split == "train" else "no held-out rows to judge on"
    return EmptySnapshotError(
        f"curation left {side} ({num_other} rows on the other side; rejected: {ledger})",
        mend="loosen the rule with the largest count, capture more traffic, or raise heldout_fraction",
    )


def on_both_sides(conversation: str, count: int) -> SnapshotError:
    """The one wording for conversations that the split has cut in two."""
    return SnapshotError(
        f"conversation {conversation!r} is on both sides of the split ({count} such)",
        mend="split by conversation; the same salt and fraction in every cycle",
    )


def _require_disjoint(train: Sequence[Row], heldout: Sequence[Row]) -> None:
    shared = {row.conversation_id for row in train} & {row.conversation_id for row in heldout}
    if shared:
        raise on_both_sides(min(shared), len(shared))
    for rows in (train, heldout):
        for row in rows:
            if row.logprobs and len(row.logprobs) != len(row.output_ids):
                raise SnapshotError(
                    f"record {row.record_id}: {len(row.logprobs)} logprobs for {len(row.output_ids)} output tokens",
                    mend="give one per output token or none",
                )


def _place(reject: Reject) -> tuple[int, int, str, str]:
    partition = -1 if reject.partition is None else reject.partition
    offset = -1 if reject.offset is None else reject.offset
    return partition, offset, reject.record_id or "", reject.reason


def _write_rejects(path: Path, rejects: Iterable[Reject]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for reject in rejects:
            line = reject._asdict()
            if reject.num_offsets == 1:
                del line["num_offsets"]
            stream.write(json.dumps(line, sort_keys=True) + "\n")

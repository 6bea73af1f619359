"""Frozen, content-addressed datasets: rows as `datasets` Arrow folders, reject ledger, manifest, completion marker.

Layout of `root/<id>/`: `train/` and `heldout/` (what `datasets.load_from_disk` reads), `rejects.jsonl`,
`manifest.json`, `COMPLETE`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import EmptySnapshotError, SnapshotError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.records import pack_floats, pack_ids

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
    """Why one entry did not become a row: its place in the log and its record id, where known; never any content."""

    reason: str
    partition: int | None
    offset: int | None
    record_id: str | None


@dataclass(frozen=True)
class Snapshot:
    """An opened snapshot: every file's digest was checked."""

    folder: Path
    id: str
    manifest: dict[str, Any]
    fingerprint: Fingerprint

    def rows(self, split: Split) -> list[Row]:
        """All rows of one side, in the snapshot's own order. Raises SnapshotError."""
        import datasets

        try:
            table = datasets.load_from_disk(str(self.folder / split)).with_format("arrow")[:]
            columns = [table.column(name).to_pylist() for name in Row._fields]
        except (OSError, ValueError, KeyError) as error:
            raise SnapshotError(f"snapshot {self.folder}: {split}/ does not load: {error}", mend=MAKE_AGAIN) from error
        texts = Row._fields.index("slices")
        columns[texts] = [json.loads(text) for text in columns[texts]]
        return [Row(*values) for values in zip(*columns, strict=True)]


def snapshot_id(
    train: Sequence[Row], heldout: Sequence[Row], *, fingerprint: Fingerprint, rules: Mapping[str, Any]
) -> str:
    """Name of a content: 32 hex digits of a sha256 over rows, rules and fingerprint; no clock, no offsets."""
    digest = hashlib.sha256()
    header = {"schema": SNAPSHOT_SCHEMA, "fingerprint": fingerprint.digest, "rules": dict(rules)}
    digest.update(json.dumps(header, sort_keys=True).encode())
    for split, rows in zip(SPLITS, (train, heldout), strict=True):
        digest.update(f"\n{split} {len(rows)}\n".encode())
        for row in rows:
            digest.update(msgspec.msgpack.encode(_canonical(row)))
    return digest.hexdigest()[:32]


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
    """Write a snapshot to `root/<id>`; the same content a second time changes nothing and returns the same.

    `source` says where the rows came from (topic, offset ranges, consent policy versions, parent); `rules` how they
    were chosen and split. A damaged folder of the same id is replaced.
    Raises EmptySnapshotError, SnapshotError, StorageError.
    """
    reasons = dict(sorted(Counter(reject.reason for reject in rejects).items()))
    for split, rows in zip(SPLITS, (train, heldout), strict=True):
        if not rows:
            raise _empty_snapshot(split, num_other=len(train) + len(heldout), reasons=reasons)
    _require_disjoint(train, heldout)
    identity = snapshot_id(train, heldout, fingerprint=fingerprint, rules=rules)
    final = root / identity
    if artifact.is_complete(final):
        try:
            return open_snapshot(final)
        except SnapshotError:
            (final / artifact.MARKER).unlink()  # damaged: without its marker, `publish` below replaces it
    manifest = {
        "kind": "snapshot",
        "schema": SNAPSHOT_SCHEMA,
        "id": identity,
        "fingerprint": fingerprint.to_dict(),
        "source": dict(source),
        "rules": dict(rules),
        "counts": {
            "rows": {"train": len(train), "heldout": len(heldout)},
            "output_tokens": {"train": num_output_tokens(train), "heldout": num_output_tokens(heldout)},
            "conversations": {"train": _num_conversations(train), "heldout": _num_conversations(heldout)},
            "rejected": reasons,
        },
    }
    with artifact.staging(final) as draft:
        _write_split(draft / "train", train)
        _write_split(draft / "heldout", heldout)
        _write_rejects(draft / REJECTS, rejects)
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


def read_rejects(snapshot: Snapshot) -> list[Reject]:
    """The reject ledger of an opened snapshot."""
    with (snapshot.folder / REJECTS).open("rb") as stream:
        return [Reject(**json.loads(line)) for line in stream]


def _empty_snapshot(split: str, *, num_other: int, reasons: Mapping[str, int]) -> EmptySnapshotError:
    """The one wording for a side without rows: an all-rejected run is an error, never an empty dataset."""
    ledger = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())) or "none"
    side = "no rows to train on" if split == "train" else "no held-out rows to judge on"
    return EmptySnapshotError(
        f"curation left {side} ({num_other} rows on the other side; rejected: {ledger})",
        mend="loosen the rule with the largest count, capture more traffic, or raise heldout_fraction",
    )


def num_output_tokens(rows: Iterable[Row]) -> int:
    """Output tokens of some rows: what is trained on and judged by."""
    return sum(len(row.output_ids) for row in rows)


def _num_conversations(rows: Iterable[Row]) -> int:
    return len({row.conversation_id for row in rows})


def _require_disjoint(train: Sequence[Row], heldout: Sequence[Row]) -> None:
    shared = {row.conversation_id for row in train} & {row.conversation_id for row in heldout}
    if shared:
        raise SnapshotError(
            f"conversation {min(shared)!r} is on both sides of the split ({len(shared)} such)",
            mend="split by conversation; the same salt and fraction in every cycle",
        )
    for rows in (train, heldout):
        for row in rows:
            if row.logprobs and len(row.logprobs) != len(row.output_ids):
                raise SnapshotError(
                    f"record {row.record_id}: {len(row.logprobs)} logprobs for {len(row.output_ids)} output tokens",
                    mend="give one per output token or none",
                )


def _canonical(row: Row) -> tuple[object, ...]:
    slices = sorted(row.slices.items())
    ids = pack_ids(row.prompt_ids), pack_ids(row.output_ids)
    temperature = struct.pack("<d", row.temperature)  # 0 and 0.0 are one temperature
    return row.record_id, row.conversation_id, *ids, slices, temperature, pack_floats(row.logprobs)


def _write_split(folder: Path, rows: Sequence[Row]) -> None:
    import datasets
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    features = datasets.Features(
        {
            "record_id": datasets.Value("string"),
            "conversation_id": datasets.Value("string"),
            "prompt_ids": datasets.List(datasets.Value("int32")),
            "output_ids": datasets.List(datasets.Value("int32")),
            "slices": datasets.Value("string"),  # JSON: an Arrow struct would give every row every other row's keys
            "temperature": datasets.Value("float64"),
            "logprobs": datasets.List(datasets.Value("float32")),
        }
    )
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in Row._fields}
    columns["slices"] = [json.dumps(slices, sort_keys=True) for slices in columns["slices"]]
    had_bar = is_progress_bar_enabled()
    disable_progress_bar()  # save_to_disk draws its own bar; ours is the caller's
    try:
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder))
    finally:
        if had_bar:
            enable_progress_bar()


def _write_rejects(path: Path, rejects: Sequence[Reject]) -> None:
    def place(reject: Reject) -> tuple[int, int, str, str]:
        partition = -1 if reject.partition is None else reject.partition
        offset = -1 if reject.offset is None else reject.offset
        return partition, offset, reject.record_id or "", reject.reason

    with path.open("w", encoding="utf-8") as stream:
        for reject in sorted(rejects, key=place):
            stream.write(json.dumps(reject._asdict(), sort_keys=True) + "\n")

"""Snapshots: content-addressed, whole or refused, and never empty."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import FINGERPRINT

from draftloop.pipeline.data import packed
from draftloop.pipeline.data.packed import encode_row, pack
from draftloop.pipeline.data.snapshot import (
    PackedSplit,
    Reject,
    Row,
    Snapshot,
    open_snapshot,
    publish_packed,
    publish_snapshot,
    read_rejects,
)
from draftloop.pipeline.errors import EmptySnapshotError, SnapshotError
from draftloop.pipeline.records import pack_floats, pack_ids


def row(name: str, conversation: str | None = None, **changes: Any) -> Row:
    plain = Row(f"r-{name}", conversation or f"c-{name}", [5, 6, 7], [8, 9], {"domain": "kitchen"}, 0.0, [])
    return plain._replace(**changes)


TRAIN = [row("one"), row("two", slices={"domain": "python", "language": "en"}, temperature=0.7, logprobs=[-0.5, -2.25])]
HELDOUT = [row("three", slices={})]
REJECTS = [Reject("undecodable", 1, 4, None), Reject("aborted", 0, 2, "r-four"), Reject("aborted", 0, 1, "r-five")]


def publish(root: Path, **changes: Any) -> Snapshot:
    given_values: dict[str, Any] = {
        "train": TRAIN,
        "heldout": HELDOUT,
        "rejects": REJECTS,
        "fingerprint": FINGERPRINT,
        "source": {"offsets": {"0": [0, 5]}},
        "rules": {"split": "by conversation"},
    }
    return publish_snapshot(root, **{**given_values, **changes})


def test_rows_come_back_as_they_went_in_and_in_their_order(tmp_path: Path) -> None:
    snapshot = open_snapshot(publish(tmp_path).folder)
    assert snapshot.rows("train") == TRAIN
    assert snapshot.rows("heldout") == HELDOUT
    assert snapshot.fingerprint == FINGERPRINT


def test_the_manifest_says_counts_source_rules_and_every_file(tmp_path: Path) -> None:
    snapshot = publish(tmp_path)
    manifest = json.loads((snapshot.folder / "manifest.json").read_text())
    assert manifest == snapshot.manifest
    assert manifest["counts"] == {
        "rows": {"train": 2, "heldout": 1},
        "output_tokens": {"train": 4, "heldout": 2},
        "conversations": {"train": 2, "heldout": 1},
        "rejected": {"aborted": 2, "undecodable": 1},
    }
    assert manifest["source"] == {"offsets": {"0": [0, 5]}}
    assert manifest["rules"] == {"split": "by conversation"}
    on_disk = {str(path.relative_to(snapshot.folder)) for path in snapshot.folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == on_disk - {"manifest.json", "COMPLETE"}


def test_the_reject_ledger_is_ordered_by_place_and_holds_no_content(tmp_path: Path) -> None:
    snapshot = publish(tmp_path)
    assert list(read_rejects(snapshot)) == [REJECTS[2], REJECTS[1], REJECTS[0]]
    lines = (snapshot.folder / "rejects.jsonl").read_text().splitlines()
    assert set(json.loads(lines[0])) == {"reason", "partition", "offset", "record_id"}


def test_the_folders_are_plain_datasets(tmp_path: Path) -> None:
    import datasets

    table = datasets.load_from_disk(str(publish(tmp_path).folder / "train"))
    assert table.column_names == list(Row._fields)
    assert table[1]["output_ids"] == [8, 9]


def test_publishing_the_same_again_changes_nothing(tmp_path: Path) -> None:
    first = publish(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = publish(tmp_path, source={"offsets": {"0": [7, 12]}})
    assert second == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times


def test_the_id_does_not_depend_on_source_rejects_or_place(tmp_path: Path) -> None:
    assert publish(tmp_path / "a").id == publish(tmp_path / "b", source={}, rejects=[]).id


@pytest.mark.parametrize(
    "changes",
    [
        {"train": TRAIN[::-1]},
        {"train": [TRAIN[0], TRAIN[1]._replace(temperature=0.8)]},
        {"train": [TRAIN[0], TRAIN[1]._replace(logprobs=[])]},
        {"train": [TRAIN[0]._replace(slices={"domain": "python"}), TRAIN[1]]},
        {"train": [TRAIN[0]._replace(prompt_ids=[5, 6], output_ids=[7, 8, 9]), TRAIN[1]]},
        {"train": HELDOUT, "heldout": TRAIN},
        {"rules": {"split": "otherwise"}},
        {"fingerprint": replace(FINGERPRINT, vocab_size=132)},
    ],
)
def test_any_change_of_rows_rules_or_target_changes_the_id(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert publish(tmp_path, **changes).id != publish(tmp_path).id


def test_whole_and_float_temperatures_are_one_content(tmp_path: Path) -> None:
    ids = {publish(tmp_path, train=[TRAIN[0]._replace(temperature=zero)]).id for zero in (0, 0.0)}
    assert len(ids) == 1


def plain_id(train: list[Row], heldout: list[Row], rules: dict[str, Any]) -> str:
    """The id as it has been since the first snapshot, from rows in memory."""
    header = {"schema": 1, "fingerprint": FINGERPRINT.digest, "rules": rules}
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for split, rows in (("train", train), ("heldout", heldout)):
        digest.update(f"\n{split} {len(rows)}\n".encode())
        for item in rows:
            ids = pack_ids(item.prompt_ids), pack_ids(item.output_ids)
            temperature = struct.pack("<d", item.temperature)
            slices = sorted(item.slices.items())
            canonical = (item.record_id, item.conversation_id, *ids, slices, temperature, pack_floats(item.logprobs))
            digest.update(msgspec.msgpack.encode(canonical))
    return digest.hexdigest()[:32]


def test_ids_of_snapshots_never_change(tmp_path: Path) -> None:
    snapshot = publish(tmp_path)
    assert snapshot.id == plain_id(TRAIN, HELDOUT, {"split": "by conversation"}) == "5d44cab7a4b451fa15850a8dadc17c67"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": []}, "no rows to train on \\(1 rows on the other side; rejected: aborted 2, undecodable 1\\)"),
        ({"heldout": []}, "no held-out rows to judge on \\(2 rows on the other side"),
        ({"train": [], "heldout": [], "rejects": []}, "no rows to train on .*rejected: none"),
    ],
)
def test_a_side_without_rows_is_an_error_with_the_reject_counts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EmptySnapshotError, match=message) as caught:
        publish(tmp_path, **changes)
    assert caught.value.mend is not None
    assert list(tmp_path.iterdir()) == []


def test_a_conversation_on_both_sides_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="conversation 'c-one' is on both sides"):
        publish(tmp_path, heldout=[row("six", conversation="c-one")])


def test_logprobs_must_match_the_output(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="record r-seven: 1 logprobs for 2 output tokens"):
        publish(tmp_path, train=[row("seven", logprobs=[-1.0])])


def _alter(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


ARROW = "data-00000-of-00001.arrow"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "altered rows": (
        lambda folder: _alter(folder / "train/data-00000-of-00001.arrow"),
        "train/data-00000-of-00001.arrow",
    ),
    "cut rows": (
        lambda folder: _cut(folder / "heldout/data-00000-of-00001.arrow"),
        "heldout/data-00000-of-00001.arrow",
    ),
    "altered ledger": (lambda folder: _alter(folder / "rejects.jsonl"), "rejects.jsonl was altered"),
    "missing file": (lambda folder: (folder / "train/state.json").unlink(), "train/state.json is missing"),
    "extra file": (lambda folder: (folder / "train/more.arrow").touch(), "train/more.arrow is unknown"),
    "missing split": (lambda folder: shutil.rmtree(folder / "heldout"), "heldout/.* is missing"),
    "altered manifest": (lambda folder: _alter(folder / "manifest.json"), "manifest.json"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
    "no marker": (lambda folder: (folder / "COMPLETE").unlink(), "no COMPLETE marker: its writing was cut off"),
    "marker of bytes": (lambda folder: (folder / "COMPLETE").write_bytes(b"\xff\xfe"), "manifest.json is not the one"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_snapshot_is_refused_by_file_with_a_mend_and_can_be_made_again(tmp_path: Path, damage: str) -> None:
    harm, named = DAMAGE[damage]
    snapshot = publish(tmp_path)
    harm(snapshot.folder)
    with pytest.raises(SnapshotError, match=named) as caught:
        open_snapshot(snapshot.folder)
    assert caught.value.mend is not None
    assert "make the snapshot again" in caught.value.mend
    again = publish(tmp_path)
    assert again.id == snapshot.id
    assert open_snapshot(again.folder).rows("train") == TRAIN


def test_a_folder_that_is_not_there_or_another_kind_is_refused(tmp_path: Path) -> None:
    from draftloop.pipeline import artifact

    with pytest.raises(SnapshotError, match="no snapshot at"):
        open_snapshot(tmp_path / "nowhere")
    with artifact.staging(tmp_path / "drafter") as draft:
        artifact.publish(draft, tmp_path / "drafter", {"kind": "drafter"})
    with pytest.raises(SnapshotError, match="is a drafter, not a snapshot"):
        open_snapshot(tmp_path / "drafter")


def test_a_snapshot_of_a_newer_draftloop_is_refused(tmp_path: Path) -> None:
    from draftloop.pipeline import artifact

    manifest = {**publish(tmp_path / "old").manifest, "schema": 2}
    with artifact.staging(tmp_path / "new") as draft:
        artifact.publish(draft, tmp_path / "new", manifest)
    with pytest.raises(SnapshotError, match="schema 2, this draftloop reads up to 1"):
        open_snapshot(tmp_path / "new")


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
ROWS = st.lists(
    st.builds(
        Row,
        st.text(max_size=5),
        st.sampled_from(["c1", "c2"]),
        IDS,
        st.just([1, 2]),
        st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
        st.floats(0, 2),
        st.sampled_from([[], [-0.25, -8.0]]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=15, deadline=None)
@given(train=ROWS)
def test_any_rows_survive_the_disk(tmp_path_factory: pytest.TempPathFactory, train: list[Row]) -> None:
    snapshot = publish(tmp_path_factory.mktemp("rows"), train=train)
    assert snapshot.rows("train") == train
    assert plain_id(snapshot.rows("train"), HELDOUT, {"split": "by conversation"}) == snapshot.id
    assert [encode_row(item) for item in snapshot.packed_rows("train")] == [pack(item) for item in train]


def test_rows_come_in_batches_that_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "BATCH_ROWS", 10)
    many = [row(f"{index}", prompt_ids=list(range(index))) for index in range(25)]
    snapshot = publish(tmp_path, train=many)
    assert [batch.num_rows for batch in snapshot.batches("train")] == [10, 10, 5]
    assert snapshot.rows("train") == many
    monkeypatch.setattr(packed, "BATCH_BYTES", 150)
    assert max(batch.num_rows for batch in publish(tmp_path / "b", train=many).batches("train")) < 10


def test_a_snapshot_written_by_datasets_itself_is_read_the_same(tmp_path: Path) -> None:
    import datasets

    folder = publish(tmp_path).folder
    theirs = datasets.load_from_disk(str(folder / "train"))
    theirs.save_to_disk(str(tmp_path / "theirs"), num_shards=2)
    assert [item for batch in packed.read_folder(tmp_path / "theirs") for item in packed.unpack_batch(batch)] == [
        packed.decode_row(pack(item)) for item in TRAIN
    ]
    schemas = [next(packed.read_folder(path)).schema for path in (folder / "train", tmp_path / "theirs")]
    assert schemas[0].equals(schemas[1], check_metadata=True)
    assert (
        json.loads((folder / "train/dataset_info.json").read_text()).items()
        >= {"features": json.loads((tmp_path / "theirs/dataset_info.json").read_text())["features"]}.items()
    )


def test_an_id_over_int32_is_refused_not_wrapped(tmp_path: Path) -> None:
    with pytest.raises(
        SnapshotError, match="a token id of prompt_ids is 2147483648, a snapshot holds up to 2147483647"
    ):
        publish(tmp_path, train=[row("big", prompt_ids=[2**31])])
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_the_rows_written(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    publish_packed(
        tmp_path,
        {
            "train": PackedSplit(map(pack, [row(f"{index}") for index in range(300)]), 300, 300),
            "heldout": PackedSplit(map(pack, HELDOUT), 1, 1),
        },
        rejects=[],
        rejected={},
        fingerprint=FINGERPRINT,
        source={},
        rules={},
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(256, 301), (301, 301)]


def test_a_damaged_arrow_file_is_told_by_its_side(tmp_path: Path) -> None:
    snapshot = publish(tmp_path)
    path = snapshot.folder / "heldout" / ARROW
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SnapshotError, match="heldout/ does not load"):
        snapshot.rows("heldout")
    (snapshot.folder / "train/state.json").write_text("{}")
    with pytest.raises(SnapshotError, match="train/ does not load"):
        list(snapshot.packed_rows("train"))

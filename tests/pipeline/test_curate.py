"""Curation: every entry becomes a row or a reject with one reason, and no conversation crosses the split."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from samples import FINGERPRINT

from draftloop.pipeline import artifact
from draftloop.pipeline.data import curate_index
from draftloop.pipeline.data.curate import CurateConfig, Window, curate, pending_window, publish_curated
from draftloop.pipeline.data.mixture import is_heldout
from draftloop.pipeline.data.packed import decode_row
from draftloop.pipeline.data.snapshot import Reject, Row, Snapshot, publish_snapshot, read_rejects
from draftloop.pipeline.errors import (
    BrokerError,
    ConfigError,
    EmptySnapshotError,
    FingerprintMismatchError,
    InputError,
    MissingTopicError,
    SnapshotError,
    StorageError,
)
from draftloop.pipeline.records import (
    CapturedRequest,
    Consent,
    Sampling,
    encode,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from draftloop.pipeline.stream.log import CaptureLog, LogEntry, MemoryLog, Offsets, StoredEntry

TOPIC = "draftloop.raw.tiny"
CONFIG = CurateConfig(heldout_fraction=0.3, max_output_tokens=20, max_sequence_tokens=30)


def record(number: int, **changes: Any) -> CapturedRequest:
    """A good record whose content is its own."""
    values: dict[str, Any] = {
        "record_id": f"r-{number}",
        "time_ms": 1000 + number,
        "conversation_id": f"c-{number}",
        "tenant": "acme",
        "subject": "s-1",
        "consent": Consent(purpose="train", policy_version="p1", basis="tenant-policy"),
        "target": FINGERPRINT.digest,
        "drafter_version": None,
        "prompt_ids": pack_ids([number % 131, number // 131, 3]),
        "output_ids": pack_ids([4, 5, 6, 7]),
        "finish_reason": "stop",
        "sampling": Sampling(temperature=0.5),
        "slices": {"domain": "kitchen"},
    }
    return CapturedRequest(**{**values, **changes})


def log_of(values: Sequence[bytes], *, num_partitions: int = 3, keys: Sequence[bytes] | None = None) -> MemoryLog:
    log = MemoryLog()
    log.create_topic(TOPIC, num_partitions=num_partitions)
    keys = keys or [f"{index}".encode() for index in range(len(values))]
    log.append(TOPIC, [LogEntry(key, value) for key, value in zip(keys, values, strict=True)])
    return log


class Decided(NamedTuple):
    """A curated window, its rows in memory."""

    train: list[Row]
    heldout: list[Row]
    rejects: list[Reject]
    counts: Any
    source: dict[str, Any]
    rules: dict[str, Any]


def unpacked(raw: bytes) -> Row:
    row = decode_row(raw)
    ids = unpack_ids(row.prompt_ids), unpack_ids(row.output_ids)
    (temperature,) = struct.unpack("<d", row.temperature)
    return Row(row.record_id, row.conversation_id, *ids, dict(row.slices), temperature, unpack_floats(row.logprobs))


def run(log: CaptureLog, window: Window | None = None, **changes: Any) -> Decided:
    settings_: dict[str, Any] = {"fingerprint": FINGERPRINT, "config": CONFIG, **changes}
    window = window or pending_window(log, TOPIC, "curator")
    with tempfile.TemporaryDirectory() as folder:
        with curate(log, window, beside=Path(folder), **settings_) as curated:
            splits = curated.splits()
            train, heldout = ([unpacked(raw) for raw in splits[side].rows] for side in ("train", "heldout"))
            decided = Decided(train, heldout, list(curated.rejects()), curated.counts, curated.source, curated.rules)
            assert curated.num_rows == len(train) + len(heldout)
            assert {side: split.num_rows for side, split in splits.items()} == {
                "train": len(train),
                "heldout": len(heldout),
            }
        assert list(Path(folder).iterdir()) == []
    return decided


def published(root: Path, log: CaptureLog, window: Window | None = None, **changes: Any) -> Snapshot:
    settings_: dict[str, Any] = {"fingerprint": FINGERPRINT, "config": CONFIG, **changes}
    with curate(log, window or pending_window(log, TOPIC, "curator"), beside=root, **settings_) as curated:
        return publish_curated(root, curated, fingerprint=settings_["fingerprint"])


def records_log(records: Sequence[CapturedRequest]) -> MemoryLog:
    return log_of([encode(item) for item in records])


def run_records(records: Sequence[CapturedRequest], **changes: Any) -> Decided:
    return run(records_log(records), **changes)


def test_a_good_record_becomes_a_row_with_the_engine_s_own_ids() -> None:
    curated = run_records([record(0, logprobs=pack_floats([-1.0, -0.5, -0.25, 0.0]))])
    rows = curated.train + curated.heldout
    assert rows == [Row("r-0", "c-0", [0, 0, 3], [4, 5, 6, 7], {"domain": "kitchen"}, 0.5, [-1.0, -0.5, -0.25, 0.0])]
    assert curated.counts == {"captured": 1, "kept": 1, "rejected": {}, "carried": {"train": 0, "heldout": 0}}


REJECTED: dict[str, bytes] = {
    "undecodable": b"\x93 not a record",
    "newer_schema": msgspec.msgpack.encode({"schema": 99}),
    "no_consent": encode(record(1, consent=Consent(purpose="debug", policy_version="p1", basis="gateway"))),
    "other_target": encode(record(1, target="0" * 16)),
    "aborted": encode(record(1, finish_reason="abort")),
    "no_prompt": encode(record(1, prompt_ids=b"")),
    "no_output": encode(record(1, output_ids=b"")),
    "too_short": encode(record(1, output_ids=pack_ids([4, 5, 6]))),
    "too_long": encode(record(1, output_ids=pack_ids([4] * 21))),
    "id_out_of_vocabulary": encode(record(1, output_ids=pack_ids([4, 5, 6, 131]))),
    "logprobs_mismatch": encode(record(1, logprobs=pack_floats([-1.0]))),
}


@pytest.mark.parametrize("reason", REJECTED)
def test_a_bad_entry_is_rejected_with_its_reason_and_place(reason: str) -> None:
    curated = run(log_of([REJECTED[reason]], num_partitions=1))
    known = None if reason in ("undecodable", "newer_schema") else "r-1"
    assert curated.rejects == [Reject(reason, 0, 0, known)]
    assert curated.counts["rejected"] == {reason: 1}
    assert (curated.train, curated.heldout) == ([], [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": pack_ids([1] * 27)}, "too_long"),  # 27 + 4 tokens, 30 allowed
        ({"output_ids": b"\x01\x00\x00"}, "undecodable"),
        ({"logprobs": pack_floats([-1.0, float("nan"), -1.0, -1.0])}, "logprobs_mismatch"),
        ({"prompt_ids": pack_ids([200, 1])}, "id_out_of_vocabulary"),
        # Permission comes before everything else that is wrong.
        ({"consent": Consent(purpose="", policy_version="p", basis="b"), "target": "0" * 16}, "no_consent"),
    ],
)
def test_more_ways_to_be_rejected(changes: dict[str, Any], reason: str) -> None:
    assert run_records([record(1, **changes)]).counts["rejected"] == {reason: 1}


def test_a_cut_record_is_rejected_with_its_reason() -> None:
    whole = encode(record(1))
    curated = run(log_of([whole[: len(whole) // 2], whole[:-1], encode(record(2))]))
    assert curated.counts["rejected"] == {"undecodable": 2}
    assert curated.counts["kept"] == 1


def test_aborted_requests_are_trained_on_only_where_asked_for() -> None:
    aborted = record(1, finish_reason="abort")
    assert run_records([aborted]).counts["rejected"] == {"aborted": 1}
    assert run_records([aborted], config=CONFIG.model_copy(update={"train_on_aborted": True})).counts["kept"] == 1


def test_a_redelivered_record_counts_once() -> None:
    again = encode(record(1))
    curated = run(log_of([again, again, encode(record(2))]))
    assert curated.counts["kept"] == 2
    assert curated.counts["rejected"] == {"duplicate_record": 1}


def test_the_same_text_under_another_id_counts_once() -> None:
    twin = record(2, prompt_ids=record(1).prompt_ids)
    forward, backward = run_records([record(1), twin]), run_records([twin, record(1)])
    assert forward.counts["rejected"] == {"duplicate_content": 1}
    assert (forward.train, forward.heldout) == (backward.train, backward.heldout)


def test_a_shift_between_prompt_and_output_is_another_content() -> None:
    shifted = record(2, prompt_ids=pack_ids([1, 0, 3, 4]), output_ids=pack_ids([5, 6, 7, 8]))
    other = record(1, prompt_ids=pack_ids([1, 0, 3]), output_ids=pack_ids([4, 5, 6, 7, 8]))
    assert run_records([shifted, other]).counts["kept"] == 2


def test_a_tenant_over_its_cap_loses_the_rest_and_nobody_else_does() -> None:
    records = [record(index, tenant="big") for index in range(10)] + [record(10, tenant="small")]
    curated = run_records(records, config=CONFIG.model_copy(update={"max_rows_per_tenant": 4}))
    assert curated.counts["rejected"] == {"tenant_cap": 6}
    assert "r-10" in {row.record_id for row in curated.train + curated.heldout}


def test_rows_do_not_depend_on_partitions_order_or_clock() -> None:
    records = [record(index, conversation_id=f"c-{index % 7}") for index in range(40)] + [record(3, time_ms=5)]
    first = run(log_of([encode(item) for item in records], num_partitions=1))
    moved = [encode(item) for item in reversed(records)]
    second = run(log_of(moved, num_partitions=4, keys=[f"{index % 5}".encode() for index in range(41)]))
    assert (first.train, first.heldout) == (second.train, second.heldout)
    assert first.counts == second.counts


def test_later_turns_stay_on_the_side_of_their_conversation() -> None:
    early = run_records([record(index) for index in range(60)])
    late = run_records([record(index + 500, conversation_id=f"c-{index}") for index in range(60)])
    for side in ("train", "heldout"):
        assert conversations(getattr(early, side)) == conversations(getattr(late, side))
    assert conversations(early.train).isdisjoint(conversations(early.heldout))
    assert 5 < len(early.heldout) < 35


def test_consent_versions_offsets_and_rules_go_into_the_manifest(tmp_path: Path) -> None:
    records = [record(index) for index in range(20)]
    records += [record(20, consent=Consent(purpose="train", policy_version="p2", basis="gateway"))]
    log = log_of([encode(item) for item in records])
    snapshot = published(tmp_path, log)
    source = snapshot.manifest["source"]
    assert source["consent_policies"] == {"p1": 20, "p2": 1}
    assert source["offsets"] == {str(partition): [0, end] for partition, end in log.end_offsets(TOPIC).items()}
    assert (source["topic"], source["captured"], source["kept"], source["parent"]) == (TOPIC, 21, 21, None)
    rules = snapshot.manifest["rules"]
    assert {name: rules[name] for name in CONFIG.model_dump()} == CONFIG.model_dump()
    assert rules["split_rule"].startswith("heldout when sha256(")


def test_a_window_takes_only_its_offsets() -> None:
    log = log_of([encode(record(index)) for index in range(10)], num_partitions=1)
    curated = run(log, Window(TOPIC, {0: 2}, {0: 5}))
    assert {row.record_id for row in curated.train + curated.heldout} == {"r-2", "r-3", "r-4"}
    log.commit("curator", TOPIC, {0: 5})
    assert pending_window(log, TOPIC, "curator") == Window(TOPIC, {0: 5}, {0: 10})


class Expired(MemoryLog):
    """A log whose oldest entries are gone by retention: what `first` names is the oldest still there."""

    def __init__(self, first: Offsets) -> None:
        super().__init__()
        self.first = first

    def start_offsets(self, topic: str) -> Offsets:
        return {**super().start_offsets(topic), **self.first}

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
        return super().read(topic, partition, max(start, self.first.get(partition, 0)), stop)


def expired_log(first: Offsets) -> Expired:
    log = Expired(first)
    log.create_topic(TOPIC, num_partitions=1)
    log.append(TOPIC, [LogEntry(b"k", encode(record(index))) for index in range(10)])
    return log


def test_a_new_group_starts_at_the_oldest_entry_still_there() -> None:
    log = expired_log({0: 6})
    assert pending_window(log, TOPIC, "curator") == Window(TOPIC, {0: 6}, {0: 10})
    assert run(log).counts == {"captured": 4, "kept": 4, "rejected": {}, "carried": {"train": 0, "heldout": 0}}


def test_what_expired_after_the_last_commit_counts_as_missing() -> None:
    log = expired_log({0: 6})
    log.commit("curator", TOPIC, {0: 4})
    assert pending_window(log, TOPIC, "curator") == Window(TOPIC, {0: 4}, {0: 10})
    assert run(log).counts["rejected"] == {"missing": 2}


def test_a_partition_that_was_empty_at_the_last_commit_starts_at_0() -> None:
    log = Expired({0: 6, 1: 3})
    log.create_topic(TOPIC, num_partitions=2)
    log.append(TOPIC, [LogEntry(f"{index}".encode(), encode(record(index))) for index in range(40)])
    log.commit("curator", TOPIC, {0: 7, 1: 0})
    assert pending_window(log, TOPIC, "curator").start == {0: 7, 1: 0}


def test_a_commit_past_the_end_says_that_the_topic_was_made_anew() -> None:
    log = log_of([encode(record(index)) for index in range(3)], num_partitions=1)
    log.commit("curator", TOPIC, {0: 50})
    with pytest.raises(
        InputError, match=r"group 'curator' has committed offset 50 .* ends at 3: the topic was made"
    ) as e:
        pending_window(log, TOPIC, "curator")
    assert e.value.mend is not None
    assert "set the group's offsets back to 0" in e.value.mend


def test_a_missing_topic_is_told_as_such() -> None:
    with pytest.raises(MissingTopicError, match="no topic 'nowhere'"):
        pending_window(MemoryLog(), "nowhere", "curator")


@pytest.mark.parametrize(
    "window", [Window(TOPIC, {}, {0: 11}), Window(TOPIC, {0: 5}, {0: 4}), Window(TOPIC, {}, {7: 1})]
)
def test_a_window_outside_the_log_is_refused(window: Window) -> None:
    log = log_of([encode(record(index)) for index in range(10)], num_partitions=1)
    with pytest.raises(InputError, match="window"):
        run(log, window)


class Gapped(MemoryLog):
    """A log from which some offsets are gone, as after erasure or retention."""

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
        return (entry for entry in super().read(topic, partition, start, stop) if entry.offset not in (0, 3, 4, 9))


def test_offsets_the_log_no_longer_has_are_counted_as_missing() -> None:
    log = Gapped()
    log.create_topic(TOPIC, num_partitions=1)
    log.append(TOPIC, [LogEntry(b"k", encode(record(index))) for index in range(10)])
    curated = run(log)
    assert curated.counts["captured"] == 10
    assert curated.counts["rejected"] == {"missing": 4}
    assert curated.rejects == [
        Reject("missing", 0, 0, None),
        Reject("missing", 0, 3, None, 2),
        Reject("missing", 0, 9, None),
    ]


class Sparse(MemoryLog):
    """A log whose partition ends far behind its last entries; all others are gone."""

    END = 2**50

    def end_offsets(self, topic: str) -> Offsets:
        return {0: self.END}

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
        for index, entry in enumerate(super().read(topic, partition, 0, 1000)):
            yield entry._replace(offset=self.END - 2 * (60 - index))


def test_a_gap_of_any_length_is_one_line_of_the_ledger(tmp_path: Path) -> None:
    log = Sparse()
    log.create_topic(TOPIC, num_partitions=1)
    log.append(TOPIC, [LogEntry(b"k", encode(record(index))) for index in range(60)])
    seen: list[tuple[int, int]] = []
    snapshot = published(tmp_path, log, on_progress=lambda done, total: seen.append((done, total)))
    rejects = list(read_rejects(snapshot))
    assert rejects[:2] == [Reject("missing", 0, 0, None, 2**50 - 120), Reject("missing", 0, 2**50 - 119, None)]
    assert len(rejects) == 61
    missing = sum(reject.num_offsets for reject in rejects)
    assert snapshot.manifest["counts"]["rejected"] == {"missing": missing}
    assert snapshot.manifest["source"]["captured"] == 2**50 == missing + snapshot.manifest["source"]["kept"]
    assert seen[-1] == (2**50, 2**50)
    assert len(seen) <= 3
    lines = (snapshot.folder / "rejects.jsonl").read_text().splitlines()
    assert [("num_offsets" in json.loads(line)) for line in lines] == [True] + 60 * [False]


LIMITED: list[tuple[dict[str, Any], dict[str, Any]]] = [  # just allowed, just not
    ({"record_id": "i" * 512}, {"record_id": "i" * 513}),
    ({"conversation_id": "ü" * 256}, {"conversation_id": "ü" * 257}),
    ({"tenant": "t" * 512}, {"tenant": "t" * 513}),
    ({"subject": "s" * 512}, {"subject": "s" * 513}),
    (
        {"consent": Consent(purpose="train", policy_version="p" * 512, basis="b")},
        {"consent": Consent(purpose="train", policy_version="p" * 513, basis="b")},
    ),
    ({"slices": {f"{i}": "" for i in range(32)}}, {"slices": {f"{i}": "" for i in range(33)}}),
    ({"slices": {"route": "x" * 4091}}, {"slices": {"route": "x" * 4092}}),
    ({"slices": {"route": "x" * 2041, "ü": "ü" * 1024}}, {"slices": {"route": "x" * 2042, "ü": "ü" * 1024}}),
]


@pytest.mark.parametrize(("allowed", "refused"), LIMITED)
def test_a_text_that_is_too_long_is_a_reason_of_its_own(allowed: dict[str, Any], refused: dict[str, Any]) -> None:
    assert run_records([record(1, **allowed)]).counts["kept"] == 1
    curated = run_records([record(1, **refused)])
    assert curated.counts["rejected"] == {"oversize_field": 1}
    (reject,) = curated.rejects
    assert reject.record_id == (None if "record_id" in refused else "r-1")


def test_permission_is_asked_before_sizes_and_no_long_id_enters_the_ledger() -> None:
    denied = Consent(purpose="debug", policy_version="p1", basis="b")
    curated = run_records([record(1, record_id="i" * 900_000, consent=denied)])
    assert [(reject.reason, reject.record_id) for reject in curated.rejects] == [("no_consent", None)]


CURATE_UNIQUE_SLICES = """
import resource, sys, tempfile
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_curate as t
class Log(t.MemoryLog):
    def end_offsets(self, topic): return {0: int(sys.argv[1])}
    def read(self, topic, partition, start, stop):
        for index in range(start, stop):
            item = t.record(index, slices={"route": f"{index:06d}" * 600})
            yield t.StoredEntry(0, index, 1, b"", t.encode(item))
log = Log()
log.create_topic(t.TOPIC, num_partitions=1)
with tempfile.TemporaryDirectory() as folder:
    snapshot = t.published(Path(folder), log)
    assert sum(snapshot.manifest["counts"]["rows"].values()) == int(sys.argv[1])
    for row in snapshot.packed_rows("train"): pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_long_texts_that_never_repeat() -> None:
    def peak_mb(count: int) -> int:
        here = Path(__file__).parent
        folders = [str(here), str(here.parent / "shared")]
        command = [sys.executable, "-c", CURATE_UNIQUE_SLICES, str(count), *folders]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    few, many = peak_mb(1500), peak_mb(7000)
    assert many - few < 10, f"{few} MB, {many} MB"  # a cache of 4096 such texts takes 30


def test_progress_ends_at_the_total() -> None:
    seen: list[tuple[int, int]] = []
    records = [record(index) for index in range(300)] + [record(0)]
    run_records(records, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(256, 301), (301, 301)]


def test_an_all_rejected_run_is_an_error_that_says_why(tmp_path: Path) -> None:
    log = records_log([record(index, output_ids=pack_ids([1, 2])) for index in range(5)])
    with pytest.raises(EmptySnapshotError, match=r"5 captured; rejected: too_short 5"):
        published(tmp_path, log)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_midway_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken(MemoryLog):
        def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
            yield from super().read(topic, partition, start, stop - 1)
            raise BrokerError("the broker went away")

    log = Broken()
    log.create_topic(TOPIC, num_partitions=1)
    log.append(TOPIC, [LogEntry(b"k", encode(record(index))) for index in range(5)])
    with pytest.raises(BrokerError, match="the broker went away"):
        published(tmp_path, log)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_curation_left_is_swept(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from draftloop.pipeline import artifact;"
        "held = artifact.staging(Path(sys.argv[1]) / 'curation'); held.__enter__();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    artifact.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_under_the_index_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curate_index, "_SETUP", f"{curate_index._SETUP}; PRAGMA max_page_count = 12;")
    with pytest.raises(StorageError, match=r"curation index .*: database or disk is full") as caught:
        published(tmp_path, records_log([record(index) for index in range(1500)]))
    assert caught.value.mend is not None
    assert "free disk space" in caught.value.mend
    assert list(tmp_path.iterdir()) == []


def test_a_parent_with_a_conversation_on_the_other_side_is_refused(tmp_path: Path) -> None:
    held = next(index for index in range(99) if is_heldout("draftloop", f"c-{index}", 0.3))
    kept = [Row("old", f"c-{held}", [1, 2], [3, 4, 5, 6], {}, 0.0, [])]
    parent = publish_snapshot(
        tmp_path,
        train=kept,
        heldout=[kept[0]._replace(conversation_id="another")],
        rejects=[],
        fingerprint=FINGERPRINT,
        source={},
        rules=CONFIG.split_rule(),
    )
    with pytest.raises(SnapshotError, match=f"conversation 'c-{held}' is on both sides of the split \\(1 such\\)"):
        published(tmp_path, records_log([record(index) for index in range(60)]), carried=parent)


def test_an_empty_window_is_an_error_at_publishing(tmp_path: Path) -> None:
    with pytest.raises(EmptySnapshotError, match="0 captured; rejected: none"):
        published(tmp_path, records_log([]))


def test_an_unknown_or_impossible_setting_is_refused() -> None:
    with pytest.raises(ValidationError):
        CurateConfig(min_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        CurateConfig(heldout_fraction=0.0)


# --- a second cycle: replay from the parent snapshot ---


def conversations(rows: Sequence[Row]) -> set[str]:
    return {row.conversation_id for row in rows}


@pytest.fixture
def parent(tmp_path: Path) -> Snapshot:
    return published(tmp_path / "s", records_log([record(index) for index in range(60)]))


def python_records(count: int) -> list[CapturedRequest]:
    return [record(index + 1000, slices={"domain": "python"}) for index in range(count)]


def test_old_train_rows_are_replayed_by_share_and_old_held_out_rows_stay_held_out(parent: Snapshot) -> None:
    config = CONFIG.model_copy(update={"replay_share": 0.25})
    curated = run_records(python_records(60), carried=parent, config=config)
    old_train = [row for row in curated.train if row.slices["domain"] == "kitchen"]
    new_train = [row for row in curated.train if row.slices["domain"] == "python"]
    assert len(old_train) == curated.counts["carried"]["train"] == round(len(new_train) / 3)
    assert {row.record_id for row in old_train} <= {row.record_id for row in parent.rows("train")}
    old_heldout = [row for row in curated.heldout if row.slices["domain"] == "kitchen"]
    assert {row.record_id for row in old_heldout} == {row.record_id for row in parent.rows("heldout")}
    assert curated.counts["captured"] == curated.counts["kept"] == 60
    assert curated.source["parent"] == curated.rules["parent"] == parent.id


def test_replay_is_capped_by_what_there_is_and_by_the_held_out_limit(parent: Snapshot) -> None:
    config = CONFIG.model_copy(update={"replay_share": 0.9, "max_carried_heldout": 3})
    curated = run_records(python_records(60), carried=parent, config=config)
    assert curated.counts["carried"] == {"train": len(parent.rows("train")), "heldout": 3}
    none = CONFIG.model_copy(update={"replay_share": 0.0, "max_carried_heldout": 0})
    assert run_records(python_records(60), carried=parent, config=none).counts["carried"] == {"train": 0, "heldout": 0}


def test_over_many_cycles_no_conversation_ever_changes_side(parent: Snapshot, tmp_path: Path) -> None:
    ever = {"train": conversations(parent.rows("train")), "heldout": conversations(parent.rows("heldout"))}
    for cycle in range(1, 4):
        records = [record(1000 * cycle + index, conversation_id=f"c-{index * cycle}") for index in range(40)]
        parent = published(tmp_path / "s", records_log(records), carried=parent)
        ever["train"] |= conversations(parent.rows("train"))
        ever["heldout"] |= conversations(parent.rows("heldout"))
    assert ever["train"].isdisjoint(ever["heldout"])


def test_content_the_parent_was_trained_on_is_not_used_to_judge(parent: Snapshot) -> None:
    trained, held = parent.rows("train")[0], parent.rows("heldout")[0]
    to_heldout = record(2000, conversation_id=held.conversation_id, prompt_ids=pack_ids(trained.prompt_ids))
    to_train = record(2001, conversation_id=trained.conversation_id, prompt_ids=pack_ids(held.prompt_ids))
    curated = run_records([to_heldout, to_train, *python_records(20)], carried=parent)
    assert curated.counts["rejected"] == {"seen_in_heldout": 1, "seen_in_training": 1}


def test_a_row_that_comes_again_is_in_the_new_snapshot_once(parent: Snapshot) -> None:
    config = CONFIG.model_copy(update={"replay_share": 0.9})
    again = [record(index) for index in range(30)]
    curated = run_records([*again, *python_records(20)], carried=parent, config=config)
    ids = Counter(row.record_id for row in curated.train + curated.heldout)
    assert set(ids.values()) == {1}
    assert len(ids) == 80


def test_a_window_of_rejects_is_an_error_even_with_a_parent(parent: Snapshot, tmp_path: Path) -> None:
    with pytest.raises(EmptySnapshotError, match="1 captured; rejected: other_target 1"):
        published(tmp_path, records_log([record(1, target="0" * 16)]), carried=parent)


def test_a_changed_split_rule_or_target_refuses_the_parent(parent: Snapshot) -> None:
    for change in ({"heldout_fraction": 0.4}, {"split_salt": "new"}):
        with pytest.raises(ConfigError, match="was split by"):
            run_records(python_records(5), carried=parent, config=CONFIG.model_copy(update=change))
    with pytest.raises(FingerprintMismatchError, match="vocab_size"):
        run_records(python_records(5), carried=parent, fingerprint=replace(FINGERPRINT, vocab_size=130))


def test_curating_the_same_window_again_gives_the_same_snapshot(parent: Snapshot, tmp_path: Path) -> None:
    first, second = (published(tmp_path / "s", records_log(python_records(30)), carried=parent) for _ in range(2))
    assert first == second
    rejected = first.manifest["counts"]["rejected"]
    assert len(list(read_rejects(first))) == sum(rejected.values())


# --- conservation for any log ---

ANY_ENTRY = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(sorted(REJECTED.values())),
    st.builds(lambda number: encode(record(number)), st.integers(0, 12)),
    st.builds(
        lambda number, ids, tenant, finish: encode(
            record(
                number, output_ids=pack_ids(ids), tenant=tenant, finish_reason=finish, conversation_id=f"c-{number % 4}"
            )
        ),
        st.integers(0, 12),
        st.lists(st.integers(0, 140), max_size=24),
        st.sampled_from(["acme", "globex"]),
        st.sampled_from(["stop", "length", "abort"]),
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(ANY_ENTRY, max_size=40),
    num_partitions=st.integers(1, 4),
    cap=st.none() | st.integers(1, 5),
    shuffle=st.randoms(use_true_random=False),
)
def test_every_entry_is_kept_or_rejected_once(
    values: list[bytes], num_partitions: int, cap: int | None, shuffle: Any
) -> None:
    config = CONFIG.model_copy(update={"max_rows_per_tenant": cap})
    log = log_of(values, num_partitions=num_partitions)
    curated = run(log, config=config)
    counts = curated.counts
    assert counts["captured"] == len(values) == counts["kept"] + sum(counts["rejected"].values())
    assert counts["kept"] == len(curated.train) + len(curated.heldout)
    places = [(reject.partition, reject.offset) for reject in curated.rejects]
    assert len(set(places)) == len(places) == sum(counts["rejected"].values())
    assert conversations(curated.train).isdisjoint(conversations(curated.heldout))
    shuffled = shuffle.sample(values, len(values))
    other = run(log_of(shuffled, num_partitions=1), config=config)
    assert (other.train, other.heldout, other.counts) == (curated.train, curated.heldout, counts)

"""Curation by a stream beside curation in memory: the plain rules, written down once, give the same snapshot."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import FINGERPRINT

from draftloop.pipeline.data.curate import CurateConfig, Window, curate, publish_curated
from draftloop.pipeline.data.mixture import is_heldout, quotas, rank, replay_rows
from draftloop.pipeline.data.snapshot import Reject, Row, Snapshot, open_snapshot, publish_snapshot, read_rejects
from draftloop.pipeline.errors import EmptySnapshotError, NewerSchemaError, UndecodableRecordError
from draftloop.pipeline.records import (
    CapturedRequest,
    Consent,
    Sampling,
    decode,
    encode,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from draftloop.pipeline.stream.log import LogEntry, MemoryLog, StoredEntry

TOPIC = "draftloop.raw.tiny"


# --- the reference: everything in memory, lists of numbers, one pass per rule ---


class Candidate(NamedTuple):
    row: Row
    tenant: str
    policy: str
    content: bytes
    entry: StoredEntry
    side: str


class Plain(NamedTuple):
    rows: dict[str, list[Row]]
    rejects: list[Reject]
    counts: dict[str, Any]
    source: dict[str, Any]
    rules: dict[str, Any]

    @property
    def id(self) -> str:
        header = {"schema": 1, "fingerprint": FINGERPRINT.digest, "rules": self.rules}
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        for split, rows in self.rows.items():
            digest.update(f"\n{split} {len(rows)}\n".encode())
            for row in rows:
                ids = pack_ids(row.prompt_ids), pack_ids(row.output_ids)
                rest = sorted(row.slices.items()), struct.pack("<d", row.temperature), pack_floats(row.logprobs)
                digest.update(msgspec.msgpack.encode((row.record_id, row.conversation_id, *ids, *rest)))
        return digest.hexdigest()[:32]


def plain_curate(log: MemoryLog, window: Window, config: CurateConfig, parent: Snapshot | None) -> Plain:
    rejects: list[Reject] = []
    old = {side: parent.rows(side) if parent else [] for side in ("train", "heldout")}
    candidates = []
    for entry, record in decoded(log, window, rejects):
        found = checked(record, config)
        if isinstance(found, str):
            rejects.append(Reject(found, entry.partition, entry.offset, known_name(record)))
            continue
        held = is_heldout(config.split_salt, record.conversation_id, config.heldout_fraction)
        side = "heldout" if held else "train"
        policy = record.consent.policy_version
        candidates.append(Candidate(found, record.tenant, policy, content(found), entry, side))
    kept = choose(candidates, old, rejects, config)
    ids, contents = {item.row.record_id for item in kept}, {item.content for item in kept}
    new: dict[str, list[Row]] = {"train": [], "heldout": []}
    for item in kept:
        new[item.side].append(item.row)
    totals = {"train": replay_rows(len(new["train"]), config.replay_share), "heldout": config.max_carried_heldout}
    carried = {}
    for side, rows in old.items():
        others = [row for row in rows if row.record_id not in ids and content(row) not in contents]
        carried[side] = replay(others, totals[side], config)
    merged = {side: sorted(new[side] + carried[side], key=lambda row: order(config, row)) for side in new}
    counts = {
        "captured": window.num_entries,
        "kept": len(kept),
        "rejected": dict(
            sorted(Counter(name for reject in rejects for name in [reject.reason] * reject.num_offsets).items())
        ),
        "carried": {side: len(rows) for side, rows in carried.items()},
    }
    source = {
        "topic": TOPIC,
        "offsets": {str(p): [window.start.get(p, 0), stop] for p, stop in sorted(window.stop.items())},
        "consent_policies": dict(sorted(Counter(item.policy for item in kept).items())),
        "captured": counts["captured"],
        "kept": counts["kept"],
        "carried": counts["carried"],
        "parent": parent.id if parent else None,
    }
    rule = "heldout when sha256(salt NUL conversation_id)[:8] >> 11 < fraction * 2^53"
    rules = {**config.model_dump(mode="json"), "split_rule": rule, "parent": parent.id if parent else None}
    return Plain(merged, sorted(rejects, key=lambda reject: reject[1:3]), counts, source, rules)


def decoded(log: MemoryLog, window: Window, rejects: list[Reject]) -> Iterator[tuple[StoredEntry, CapturedRequest]]:
    chosen: dict[str, tuple[bytes, StoredEntry, CapturedRequest]] = {}
    for partition, stop in sorted(window.stop.items()):
        there = {entry.offset: entry for entry in log.read(TOPIC, partition, window.start.get(partition, 0), stop)}
        for offset in range(window.start.get(partition, 0), stop):
            if offset not in there:
                last = rejects[-1] if rejects else None
                if (
                    last is not None
                    and (last.reason, last.partition) == ("missing", partition)
                    and (last.offset is not None and last.offset + last.num_offsets == offset)
                ):
                    rejects[-1] = last._replace(num_offsets=last.num_offsets + 1)
                else:
                    rejects.append(Reject("missing", partition, offset, None))
                continue
            entry = there[offset]
            try:
                record = decode(entry.value)
            except NewerSchemaError:
                rejects.append(Reject("newer_schema", partition, offset, None))
                continue
            except UndecodableRecordError:
                rejects.append(Reject("undecodable", partition, offset, None))
                continue
            this = (hashlib.sha256(entry.value).digest(), entry, record)
            if (other := chosen.get(record.record_id)) is not None:
                this, other = sorted((other, this), key=lambda item: item[0])
                rejects.append(Reject("duplicate_record", other[1].partition, other[1].offset, known_name(record)))
            chosen[record.record_id] = this
    for _, entry, record in chosen.values():
        yield entry, record


def known_name(record: CapturedRequest) -> str | None:
    return record.record_id if len(record.record_id.encode()) <= 512 else None


def checked(record: CapturedRequest, config: CurateConfig) -> Row | str:
    if record.consent.purpose != "train":
        return "no_consent"
    if record.target != FINGERPRINT.digest:
        return "other_target"
    texts = [record.record_id, record.conversation_id, record.tenant, record.subject, record.consent.policy_version]
    slices = [text for pair in record.slices.items() for text in pair]
    if max(len(text.encode()) for text in texts) > 512 or len(slices) > 64 or len("".join(slices).encode()) > 4096:
        return "oversize_field"
    if record.finish_reason == "abort" and not config.train_on_aborted:
        return "aborted"
    try:
        prompt, output = unpack_ids(record.prompt_ids), unpack_ids(record.output_ids)
        logprobs = unpack_floats(record.logprobs) if record.logprobs is not None else []
    except UndecodableRecordError:
        return "undecodable"
    if not prompt:
        return "no_prompt"
    if not output:
        return "no_output"
    if len(output) < config.min_output_tokens:
        return "too_short"
    if len(output) > config.max_output_tokens or len(prompt) + len(output) > config.max_sequence_tokens:
        return "too_long"
    if max(max(prompt), max(output)) >= FINGERPRINT.vocab_size:
        return "id_out_of_vocabulary"
    if logprobs and (len(logprobs) != len(output) or not all(map(math.isfinite, logprobs))):
        return "logprobs_mismatch"
    temperature = record.sampling.temperature
    return Row(record.record_id, record.conversation_id, prompt, output, dict(record.slices), temperature, logprobs)


def choose(
    candidates: list[Candidate], old: dict[str, list[Row]], rejects: list[Reject], config: CurateConfig
) -> list[Candidate]:
    known = {side: {content(row) for row in rows} for side, rows in old.items()}
    kept = []
    seen: set[bytes] = set()
    num_by_tenant: dict[str, int] = defaultdict(int)
    for item in sorted(candidates, key=lambda item: order(config, item.row)):
        reason = None
        if item.content in seen:
            reason = "duplicate_content"
        elif item.side == "heldout" and item.content in known["train"]:
            reason = "seen_in_training"
        elif item.side == "train" and item.content in known["heldout"]:
            reason = "seen_in_heldout"
        else:
            seen.add(item.content)
            num_by_tenant[item.tenant] += 1
            limit = config.max_rows_per_tenant
            if limit is not None and num_by_tenant[item.tenant] > limit:
                reason = "tenant_cap"
        if reason is None:
            kept.append(item)
        else:
            rejects.append(Reject(reason, item.entry.partition, item.entry.offset, item.row.record_id))
    return kept


def replay(rows: Sequence[Row], total: int, config: CurateConfig) -> list[Row]:
    by_slice: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: rank(f"{config.split_salt}/replay", row.record_id)):
        by_slice[row.slices.get(config.replay_slice, "")[:64]].append(row)
    given_places = quotas({name: len(members) for name, members in by_slice.items()}, total)
    return [row for name, count in given_places.items() for row in by_slice[name][:count]]


def order(config: CurateConfig, row: Row) -> bytes:
    return rank(f"{config.split_salt}/order", row.record_id)


def content(row: Row) -> bytes:
    length = len(row.prompt_ids).to_bytes(8, "little")
    return hashlib.sha256(length + pack_ids(row.prompt_ids) + pack_ids(row.output_ids)).digest()


# --- both on the same logs ---


class Gapped(MemoryLog):
    """A log from which some offsets are gone, alone and next to each other."""

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
        return (entry for entry in super().read(topic, partition, start, stop) if entry.offset % 7 not in (3, 4, 6))


def record(number: int | str, **changes: Any) -> CapturedRequest:
    values: dict[str, Any] = {
        "record_id": f"r-{number}",
        "time_ms": 0,
        "conversation_id": f"c-{int(number) % 9}",
        "tenant": "acme",
        "subject": "s",
        "consent": Consent(purpose="train", policy_version="p1", basis="tenant-policy"),
        "target": FINGERPRINT.digest,
        "drafter_version": None,
        "prompt_ids": pack_ids([int(number) % 131, 3]),
        "output_ids": pack_ids([4, 5]),
        "finish_reason": "stop",
        "sampling": Sampling(),
    }
    return CapturedRequest(**{**values, **changes})


IDS = st.lists(st.integers(0, 133), max_size=6).map(pack_ids) | st.sampled_from([b"", b"\x01", pack_ids([2**32 - 1])])
FEW = st.sampled_from([pack_ids([1]), pack_ids([1, 2]), pack_ids([2, 1, 3])])  # so that contents repeat
RECORDS = st.builds(
    lambda number, **changes: encode(record(number, **changes)),
    st.integers(0, 40) | st.just("9" * 600),
    time_ms=st.integers(0, 3),
    conversation_id=st.integers(0, 30).map("c-{}".format) | st.text(max_size=3),
    tenant=st.sampled_from(["acme", "globex", "initech"]),
    consent=st.sampled_from(
        [Consent(purpose="train", policy_version=version, basis="b") for version in ("p1", "p2")] * 4
        + [Consent(purpose="debug", policy_version="p1", basis="b")]
    ),
    target=st.sampled_from([FINGERPRINT.digest] * 8 + ["0" * 16]),
    prompt_ids=FEW | FEW | IDS,
    output_ids=FEW | FEW | IDS,
    finish_reason=st.sampled_from(["stop", "stop", "length", "abort"]),
    sampling=st.floats(0, 2).map(lambda value: Sampling(temperature=value)),
    subject=st.sampled_from(["s"] * 9 + ["x" * 512, "ü" * 257]),
    logprobs=st.none() | st.sampled_from([b"", pack_floats([-1.0, -0.5]), pack_floats([math.nan, 0.0]), b"\x00"]),
    slices=st.dictionaries(st.sampled_from(["domain", "language", "Ü"]), st.sampled_from(["a", "b", "ß"]), max_size=2)
    | st.sampled_from([{}, {"domain": "d" * 4091}, {"route": "r" * 4091}, {f"{index}": "" for index in range(33)}]),
)
ENTRIES = st.lists(
    RECORDS | RECORDS | RECORDS | st.sampled_from([b"\x93 no record", msgspec.msgpack.encode({"schema": 9})]),
    max_size=60,
)
CONFIGS = st.builds(
    CurateConfig,
    min_output_tokens=st.integers(1, 2),
    max_output_tokens=st.just(5),
    max_sequence_tokens=st.just(8),
    heldout_fraction=st.just(0.3),
    train_on_aborted=st.booleans(),
    max_rows_per_tenant=st.none() | st.integers(1, 6),
    replay_share=st.sampled_from([0.0, 0.3, 0.8]),
    max_carried_heldout=st.integers(0, 4),
)
# Rows of a parent by any hand: repeated ids and contents, any order, and numbers that windows bring again.
PARENT_ROWS = st.lists(
    st.builds(
        lambda number, prompt, slices, temperature: Row(
            f"r-{number}", "", unpack_ids(prompt), [1, 2], slices, temperature, []
        ),
        st.integers(0, 60),
        FEW,
        st.dictionaries(st.just("domain"), st.sampled_from(["a", "b", "z" * 64, "z" * 65]), max_size=1),
        st.sampled_from([0.0, 0.5]),
    ),
    min_size=1,
    max_size=12,
)


def log_of(values: Sequence[bytes], num_partitions: int, *, gaps: bool) -> MemoryLog:
    log = Gapped() if gaps else MemoryLog()
    log.create_topic(TOPIC, num_partitions=num_partitions)
    log.append(TOPIC, [LogEntry(f"{index}".encode(), value) for index, value in enumerate(values)])
    return log


def parent_of(root: Path, config: CurateConfig, sides: tuple[list[Row], list[Row]]) -> Snapshot:
    train, heldout = (
        [row._replace(conversation_id=name) for row in rows] for name, rows in zip("th", sides, strict=True)
    )
    return publish_snapshot(
        root, train=train, heldout=heldout, rejects=[], fingerprint=FINGERPRINT, source={}, rules=config.split_rule()
    )


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=ENTRIES,
    num_partitions=st.integers(1, 3),
    gaps=st.booleans(),
    skip=st.integers(0, 3),
    config=CONFIGS,
    sides=st.none() | st.tuples(PARENT_ROWS, PARENT_ROWS),
)
def test_streamed_and_plain_curation_give_the_same_snapshot(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[bytes],
    num_partitions: int,
    gaps: bool,
    skip: int,
    config: CurateConfig,
    sides: tuple[list[Row], list[Row]] | None,
) -> None:
    root = tmp_path_factory.mktemp("snapshots")
    log = log_of(values, num_partitions, gaps=gaps)
    parent = parent_of(root, config, sides) if sides else None
    ends = log.end_offsets(TOPIC)
    window = Window(TOPIC, {partition: min(skip, end) for partition, end in ends.items()}, ends)
    plain = plain_curate(log, window, config, parent)
    snapshot = None
    with curate(log, window, beside=root, fingerprint=FINGERPRINT, config=config, carried=parent) as curated:
        assert curated.counts == plain.counts
        assert curated.source == plain.source
        assert curated.rules == plain.rules
        assert list(curated.rejects()) == plain.rejects
        try:
            snapshot = publish_curated(root, curated, fingerprint=FINGERPRINT)
        except EmptySnapshotError:
            assert not (plain.counts["kept"] and plain.rows["train"] and plain.rows["heldout"])
    if snapshot is None:
        return
    assert snapshot.id == plain.id
    assert {side: snapshot.rows(side) for side in ("train", "heldout")} == plain.rows
    assert list(read_rejects(snapshot)) == plain.rejects
    assert snapshot.manifest["counts"] == {
        "rows": {side: len(rows) for side, rows in plain.rows.items()},
        "output_tokens": {side: sum(len(row.output_ids) for row in rows) for side, rows in plain.rows.items()},
        "conversations": {side: len({row.conversation_id for row in rows}) for side, rows in plain.rows.items()},
        "rejected": plain.counts["rejected"],
    }


def test_a_thousand_records_over_many_files_and_batches_give_the_plain_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftloop.pipeline.data.spill.ROWS_PER_FILE", 10)
    monkeypatch.setattr("draftloop.pipeline.data.packed.BATCH_ROWS", 37)
    config = CurateConfig(min_output_tokens=1, heldout_fraction=0.3)
    parent = None
    for cycle in range(3):
        records = [
            record(
                700 * cycle + index % 930,
                conversation_id=f"c-{(index + 7 * cycle) % 300}",
                prompt_ids=pack_ids([index % 131, (index // 131) % 131, cycle % 2]),
                slices={"domain": f"{index % 3}"},
            )
            for index in range(1000)
        ]
        log = log_of([encode(item) for item in records], 4, gaps=False)
        window = Window(TOPIC, log.start_offsets(TOPIC), log.end_offsets(TOPIC))
        plain = plain_curate(log, window, config, parent)
        with curate(log, window, beside=tmp_path, fingerprint=FINGERPRINT, config=config, carried=parent) as curated:
            assert curated.counts == plain.counts
            parent = publish_curated(tmp_path, curated, fingerprint=FINGERPRINT)
        assert parent.id == plain.id
        assert parent == open_snapshot(parent.folder)
        assert {side: parent.rows(side) for side in ("train", "heldout")} == plain.rows
    assert parent is not None
    assert set(parent.manifest["counts"]["rejected"]) == {"duplicate_record", "seen_in_heldout", "seen_in_training"}

"""From a window of log offsets to the rows of a snapshot: decode, check, deduplicate, split, mix in old rows.

Nothing here depends on the clock, on how partitions interleave, or on who reads first: the same entries and the same
rules give the same rows in the same order. Every entry of the window becomes a row or a reject with one reason.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from draftloop.pipeline.data.mixture import cap_per_owner, is_heldout, rank, replay, replay_rows
from draftloop.pipeline.data.snapshot import Reject, Row, Snapshot, Split, publish_snapshot
from draftloop.pipeline.errors import (
    ConfigError,
    EmptySnapshotError,
    InputError,
    NewerSchemaError,
    UndecodableRecordError,
)
from draftloop.pipeline.fingerprint import Fingerprint, require_same
from draftloop.pipeline.records import CapturedRequest, decode, pack_ids, unpack_floats, unpack_ids
from draftloop.pipeline.stream.log import CaptureLog, Offsets, StoredEntry

Reason = Literal[
    "missing",  # the log gave no entry for this offset: erased or expired
    "undecodable",
    "newer_schema",
    "duplicate_record",  # the same record id again: a redelivery
    "no_consent",  # kept for another purpose than training
    "other_target",
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


@dataclass(frozen=True)
class Curated:
    """Rows ready to publish, with what the manifest says about them."""

    train: list[Row]
    heldout: list[Row]
    rejects: list[Reject]
    counts: Counts
    source: dict[str, Any]
    rules: dict[str, Any]


class _Candidate(NamedTuple):
    """A row that has passed the checks on it alone."""

    row: Row
    tenant: str
    policy: str
    content: bytes
    entry: StoredEntry
    side: Split


def pending_window(log: CaptureLog, topic: str, group: str) -> Window:
    """What a group has not yet committed. Raises InputError for an unknown topic."""
    return Window(topic, log.committed(group, topic), log.end_offsets(topic))


def curate(
    log: CaptureLog,
    window: Window,
    *,
    fingerprint: Fingerprint,
    config: CurateConfig,
    carried: Snapshot | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Curated:
    """Turn a window into train and held-out rows, replaying a share of the parent snapshot `carried`.

    `on_progress(done, total)` is called every 256 entries and at the end. Raises InputError (window not in the log),
    ConfigError (split rule changed since the parent), FingerprintMismatchError (parent of another target).
    """
    _check_window(log, window)
    parent = _Parent(carried, fingerprint, config)
    ledger = _Ledger()
    candidates: list[_Candidate] = []
    total = window.num_entries
    for done, (entry, record) in enumerate(_decoded(log, window, ledger), start=1):
        if record is not None:
            found = _check(record, fingerprint, config)
            if isinstance(found, str):
                ledger.reject(found, entry, record.record_id)
            else:
                side = _side(config, record.conversation_id)
                content = _content(found)
                policy = record.consent.policy_version
                candidates.append(_Candidate(found, record.tenant, policy, content, entry, side))
        if on_progress is not None and (done % 256 == 0 or done == total):
            on_progress(done, total)
    kept = _choose(candidates, parent, ledger, config)
    return _assemble(kept, parent, ledger, window, config)


def publish_curated(root: Path, curated: Curated, *, fingerprint: Fingerprint) -> Snapshot:
    """Publish curated rows. Raises EmptySnapshotError also where only carried rows are left."""
    if not curated.counts["kept"]:
        ledger = ", ".join(f"{reason} {count}" for reason, count in curated.counts["rejected"].items()) or "none"
        raise EmptySnapshotError(
            f"no entry of the window became a row ({curated.counts['captured']} captured; rejected: {ledger})",
            mend="loosen the rule with the largest count, or capture more traffic",
        )
    return publish_snapshot(
        root,
        train=curated.train,
        heldout=curated.heldout,
        rejects=curated.rejects,
        fingerprint=fingerprint,
        source=curated.source,
        rules=curated.rules,
    )


class _Ledger:
    """Rejects as they happen, and how many entries the window had."""

    def __init__(self) -> None:
        self.captured = 0
        self.rejects: list[Reject] = []

    def reject(self, reason: Reason, entry: StoredEntry, record_id: str | None) -> None:
        self.rejects.append(Reject(reason, entry.partition, entry.offset, record_id))


class _Parent:
    """The carried snapshot's rows and contents by side; empty without one."""

    def __init__(self, carried: Snapshot | None, fingerprint: Fingerprint, config: CurateConfig) -> None:
        self.id = carried.id if carried else None
        self.rows: dict[Split, list[Row]] = {"train": [], "heldout": []}
        if carried is not None:
            require_same(fingerprint, carried.fingerprint, expected_of="this run", found_of=f"snapshot {carried.id}")
            wanted = config.split_rule()
            found = {name: carried.manifest["rules"].get(name) for name in wanted}
            if found != wanted:
                raise ConfigError(
                    f"snapshot {carried.id} was split by {found}, this run splits by {wanted}",
                    mend="keep heldout_fraction and split_salt for all cycles, or start without a parent snapshot",
                )
            self.rows = {"train": carried.rows("train"), "heldout": carried.rows("heldout")}
        self.contents = {side: {_content(row) for row in rows} for side, rows in self.rows.items()}


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


def _decoded(log: CaptureLog, window: Window, ledger: _Ledger) -> Iterator[tuple[StoredEntry, CapturedRequest | None]]:
    """Every offset of the window once; None where it was rejected already. Record ids are unique among the rest."""
    # Of two entries with one record id the one with the smaller bytes is kept: offsets depend on who wrote first.
    chosen: dict[str, tuple[bytes, StoredEntry, CapturedRequest]] = {}
    for partition, stop in sorted(window.stop.items()):
        expected = window.start.get(partition, 0)
        for entry in log.read(window.topic, partition, expected, stop):
            yield from _gap(partition, expected, entry.offset, ledger)
            expected = entry.offset + 1
            ledger.captured += 1
            try:
                record = decode(entry.value)
            except NewerSchemaError:
                ledger.reject("newer_schema", entry, None)
                yield entry, None
                continue
            except UndecodableRecordError:
                ledger.reject("undecodable", entry, None)
                yield entry, None
                continue
            this = (hashlib.sha256(entry.value).digest(), entry, record)
            if (other := chosen.get(record.record_id)) is not None:
                this, other = sorted((other, this), key=lambda item: item[0])
                ledger.reject("duplicate_record", other[1], record.record_id)
                yield other[1], None
            chosen[record.record_id] = this
        yield from _gap(partition, expected, stop, ledger)
    for _, entry, record in chosen.values():
        yield entry, record


def _gap(partition: int, start: int, stop: int, ledger: _Ledger) -> Iterator[tuple[StoredEntry, None]]:
    for offset in range(start, stop):
        entry = StoredEntry(partition, offset, 0, b"", b"")
        ledger.captured += 1
        ledger.reject("missing", entry, None)
        yield entry, None


def _check(record: CapturedRequest, fingerprint: Fingerprint, config: CurateConfig) -> Row | Reason:
    """The row of a record, or the first reason why it has none; permission is asked before content is looked at."""
    if record.consent.purpose != "train":
        return "no_consent"
    if record.target != fingerprint.digest:
        return "other_target"
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
    if max(max(prompt), max(output)) >= fingerprint.vocab_size:
        return "id_out_of_vocabulary"
    if logprobs and (len(logprobs) != len(output) or not all(map(math.isfinite, logprobs))):
        return "logprobs_mismatch"
    temperature = record.sampling.temperature
    return Row(record.record_id, record.conversation_id, prompt, output, dict(record.slices), temperature, logprobs)


def _choose(
    candidates: Sequence[_Candidate], parent: _Parent, ledger: _Ledger, config: CurateConfig
) -> list[_Candidate]:
    """Drop repeated content, content of the parent's other side, and what is over a tenant's cap."""

    def order(candidate: _Candidate) -> bytes:
        return _order(config, candidate.row)

    fresh: list[_Candidate] = []
    seen: set[bytes] = set()
    for candidate in sorted(candidates, key=order):
        reason: Reason | None = None
        if candidate.content in seen:
            reason = "duplicate_content"
        elif candidate.side == "heldout" and candidate.content in parent.contents["train"]:
            reason = "seen_in_training"
        elif candidate.side == "train" and candidate.content in parent.contents["heldout"]:
            reason = "seen_in_heldout"
        if reason is not None:
            ledger.reject(reason, candidate.entry, candidate.row.record_id)
            continue
        seen.add(candidate.content)
        fresh.append(candidate)
    limit = config.max_rows_per_tenant
    kept, over = cap_per_owner(fresh, limit, owner=lambda candidate: candidate.tenant, order=order)
    for candidate in over:
        ledger.reject("tenant_cap", candidate.entry, candidate.row.record_id)
    return kept


def _assemble(
    kept: Sequence[_Candidate], parent: _Parent, ledger: _Ledger, window: Window, config: CurateConfig
) -> Curated:
    new: dict[Split, list[Row]] = {"train": [], "heldout": []}
    for candidate in kept:
        new[candidate.side].append(candidate.row)
    totals: dict[Split, int] = {
        "train": replay_rows(len(new["train"]), config.replay_share),
        "heldout": config.max_carried_heldout,
    }
    ids = {candidate.row.record_id for candidate in kept}
    contents = {candidate.content for candidate in kept}
    old: dict[Split, list[Row]] = {}
    for side, rows in parent.rows.items():
        others = [row for row in rows if row.record_id not in ids and _content(row) not in contents]
        old[side] = replay(others, totals[side], slice_key=config.replay_slice, salt=f"{config.split_salt}/replay")
    rejected = dict(sorted(Counter(reject.reason for reject in ledger.rejects).items()))
    counts: Counts = {
        "captured": ledger.captured,
        "kept": len(kept),
        "rejected": rejected,
        "carried": {side: len(rows) for side, rows in old.items()},
    }
    assert counts["captured"] == counts["kept"] + sum(rejected.values()) == window.num_entries
    merged = {side: sorted(new[side] + old[side], key=lambda row: _order(config, row)) for side in new}
    source = {
        "topic": window.topic,
        "offsets": {str(p): [window.start.get(p, 0), stop] for p, stop in sorted(window.stop.items())},
        "consent_policies": dict(sorted(Counter(candidate.policy for candidate in kept).items())),
        "captured": counts["captured"],
        "kept": counts["kept"],
        "carried": counts["carried"],
        "parent": parent.id,
    }
    rules = {**config.model_dump(mode="json"), "split_rule": SPLIT_RULE, "parent": parent.id}
    return Curated(merged["train"], merged["heldout"], ledger.rejects, counts, source, rules)


def _side(config: CurateConfig, conversation_id: str) -> Split:
    return "heldout" if is_heldout(config.split_salt, conversation_id, config.heldout_fraction) else "train"


def _order(config: CurateConfig, row: Row) -> bytes:
    # Another salt than the split's: where record and conversation ids coincide, the order must not follow the split.
    return rank(f"{config.split_salt}/order", row.record_id)


def _content(row: Row) -> bytes:
    length = len(row.prompt_ids).to_bytes(8, "little")  # else a longer prompt and a shorter output could look the same
    return hashlib.sha256(length + pack_ids(row.prompt_ids) + pack_ids(row.output_ids)).digest()

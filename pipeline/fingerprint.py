"""Identity of a target, carried by every record, snapshot, checkpoint and verdict, and compared at every seam."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from draftloop.pipeline.errors import FingerprintMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What makes two targets the same target for a drafter. Digests are sha256 hex."""

    weights_digest: str
    tokenizer_digest: str
    template_digest: str
    vocab_size: int  # tokens the tokenizer knows
    padded_vocab_size: int  # rows of the target's embedding and head
    hidden_size: int
    num_layers: int
    tap_layers: tuple[int, ...]  # hidden states *entering* these layers (HF `hidden_states[k]`)
    dtype: str
    quantization: str
    max_position_embeddings: int
    rope_theta: float

    @property
    def digest(self) -> str:
        """Short stable name of this identity: 16 hex digits over all fields."""
        encoded = msgspec.json.encode(asdict(self), order="sorted")
        return hashlib.sha256(encoded).hexdigest()[:16]

    def to_dict(self) -> dict[str, object]:
        """Plain values for a manifest."""
        return {**asdict(self), "tap_layers": list(self.tap_layers)}

    @classmethod
    def from_dict(cls, values: object) -> Fingerprint:
        """Read a manifest's fingerprint. Raises msgspec.ValidationError for a missing or unknown field."""
        return msgspec.convert(values, cls)


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over the vocabulary: which text each id stands for. Trainer and engine must say the same of one."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def require_same(expected: Fingerprint, found: Fingerprint, *, expected_of: str, found_of: str) -> None:
    """Raise FingerprintMismatchError naming every field in which the two differ."""
    if expected == found:
        return
    want, have = asdict(expected), asdict(found)
    rows = [
        f"{key}: {expected_of} has {want[key]!r}, {found_of} has {have[key]!r}"
        for key in want
        if want[key] != have[key]
    ]
    raise FingerprintMismatchError(
        f"{found_of} belongs to another target than {expected_of} ({'; '.join(rows)})",
        mend="use artifacts made for this target, or retrain the drafter for it",
    )


def require_same_digest(expected: str, found: str, *, expected_of: str, found_of: str) -> None:
    """The same comparison where only digests travel (records)."""
    if expected != found:
        raise FingerprintMismatchError(
            f"{found_of} belongs to target {found}, {expected_of} to target {expected}",
            mend="use artifacts made for this target, or retrain the drafter for it",
        )

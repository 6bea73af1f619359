"""A target's identity: every field counts, and a difference is named."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import FINGERPRINT as ONE

from draftloop.pipeline.errors import FingerprintMismatchError
from draftloop.pipeline.fingerprint import Fingerprint, require_same, require_same_digest

OTHER: dict[str, Any] = {
    "weights_digest": "d" * 64,
    "tokenizer_digest": "d" * 64,
    "template_digest": "d" * 64,
    "vocab_size": 130,
    "padded_vocab_size": 192,
    "hidden_size": 64,
    "num_layers": 5,
    "tap_layers": (1, 2, 4),
    "dtype": "bfloat16",
    "quantization": "int8",
    "max_position_embeddings": 256,
    "rope_theta": 500000.0,
}


def test_every_field_is_tried_below() -> None:
    assert OTHER.keys() == {field.name for field in fields(Fingerprint)}


@pytest.mark.parametrize("name", OTHER)
def test_a_difference_in_any_field_changes_the_digest_and_is_named_with_both_values(name: str) -> None:
    two = replace(ONE, **{name: OTHER[name]})
    assert two.digest != ONE.digest
    with pytest.raises(FingerprintMismatchError) as caught:
        require_same(ONE, two, expected_of="the engine", found_of="the drafter")
    assert f"{name}: the engine has {getattr(ONE, name)!r}, the drafter has {OTHER[name]!r}" in caught.value.message
    assert caught.value.mend


def test_only_the_fields_that_differ_are_named() -> None:
    with pytest.raises(FingerprintMismatchError) as caught:
        require_same(ONE, replace(ONE, dtype="bfloat16"), expected_of="a", found_of="b")
    assert caught.value.message == ("b belongs to another target than a (dtype: a has 'float32', b has 'bfloat16')")


def test_the_same_target_passes() -> None:
    require_same(ONE, replace(ONE), expected_of="a", found_of="b")
    require_same_digest(ONE.digest, replace(ONE).digest, expected_of="a", found_of="b")


def test_digests_that_differ_are_named() -> None:
    with pytest.raises(FingerprintMismatchError, match="record r-1 belongs to target 22, the engine to target 11"):
        require_same_digest("11", "22", expected_of="the engine", found_of="record r-1")


@given(
    st.builds(
        Fingerprint,
        weights_digest=st.text(max_size=4),
        tokenizer_digest=st.text(max_size=4),
        template_digest=st.text(max_size=4),
        vocab_size=st.integers(0, 2**31),
        padded_vocab_size=st.integers(0, 2**31),
        hidden_size=st.integers(0, 2**20),
        num_layers=st.integers(0, 200),
        tap_layers=st.lists(st.integers(0, 200), max_size=5).map(tuple),
        dtype=st.text(max_size=4),
        quantization=st.text(max_size=4),
        max_position_embeddings=st.integers(0, 2**31),
        rope_theta=st.floats(1, 1e9),
    )
)
def test_a_manifest_gives_back_the_same_identity(fingerprint: Fingerprint) -> None:
    again = Fingerprint.from_dict(json.loads(json.dumps(fingerprint.to_dict())))
    assert again == fingerprint
    assert again.digest == fingerprint.digest


@pytest.mark.parametrize("change", [{"vocab_size": None}, {"vocab_size": "131"}, {"tap_layers": 3}])
def test_a_manifest_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        Fingerprint.from_dict({**ONE.to_dict(), **change})
    with pytest.raises(msgspec.ValidationError):
        Fingerprint.from_dict({name: value for name, value in ONE.to_dict().items() if name not in change})


def test_the_digest_of_an_identity_never_changes() -> None:
    # Written down once: records in running logs carry it.
    assert ONE.digest == "e03795d1f1e46dd4"
    plain = json.dumps(ONE.to_dict(), sort_keys=True, separators=(",", ":"))
    assert ONE.digest == hashlib.sha256(plain.encode()).hexdigest()[:16]

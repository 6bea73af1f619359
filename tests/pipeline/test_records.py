"""The wire records: what goes in comes out, and what is cut, altered or newer is told apart."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.pipeline.errors import NewerSchemaError, UndecodableRecordError
from draftloop.pipeline.records import (
    SCHEMA_VERSION,
    CapturedRequest,
    Consent,
    Sampling,
    SpecCounters,
    decode,
    encode,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)

RECORD = CapturedRequest(
    record_id="r-1",
    time_ms=1_700_000_000_000,
    conversation_id="c-1",
    tenant="acme",
    subject="s-1",
    consent=Consent(purpose="train", policy_version="p1", basis="tenant-policy"),
    target="f" * 16,
    drafter_version="3",
    prompt_ids=pack_ids([1, 2, 3]),
    output_ids=pack_ids([4, 5]),
    finish_reason="stop",
    sampling=Sampling(temperature=0.5, seed=7),
)
TEXT = st.text(max_size=8)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=12)
COUNTS = st.lists(st.integers(0, 16), max_size=6).map(tuple)
RECORDS = st.builds(
    CapturedRequest,
    schema=st.just(SCHEMA_VERSION),
    record_id=TEXT,
    time_ms=st.integers(0, 2**60),
    conversation_id=TEXT,
    tenant=TEXT,
    subject=TEXT,
    consent=st.builds(Consent, purpose=TEXT, policy_version=TEXT, basis=TEXT),
    target=TEXT,
    drafter_version=st.none() | TEXT,
    prompt_ids=IDS.map(pack_ids),
    output_ids=IDS.map(pack_ids),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1),
        top_k=st.integers(0, 2**31),
        max_tokens=st.integers(0, 2**31),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    ),
    logprobs=st.none() | st.lists(st.floats(-50, 0, width=32), max_size=6).map(pack_floats),
    accepted=COUNTS,
    drafted=COUNTS,
    slices=st.dictionaries(TEXT, TEXT, max_size=3),
    redaction=st.lists(TEXT, max_size=2).map(tuple),
)


@given(RECORDS)
def test_any_record_comes_back_as_it_was(record: CapturedRequest) -> None:
    assert decode(encode(record)) == record
    assert encode(decode(encode(record))) == encode(record)


@given(RECORDS, st.data())
def test_a_record_cut_anywhere_does_not_decode(record: CapturedRequest, data: st.DataObject) -> None:
    whole = encode(record)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(UndecodableRecordError):
        decode(whole[:cut])


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_told_undecodable(raw: bytes) -> None:
    try:
        decode(raw)
    except (UndecodableRecordError, NewerSchemaError):
        return


@given(st.integers(0, len(encode(RECORD)) - 1), st.integers(1, 255))
def test_an_altered_byte_never_escapes_as_another_error(place: int, flip: int) -> None:
    raw = bytearray(encode(RECORD))
    raw[place] ^= flip
    try:
        decode(bytes(raw))
    except (UndecodableRecordError, NewerSchemaError):
        return


def test_a_newer_schema_is_told_before_its_unknown_shape_is_read() -> None:
    raw = msgspec.msgpack.encode({"schema": SCHEMA_VERSION + 1, "record_id": ["another", "shape"]})
    with pytest.raises(NewerSchemaError, match=f"schema {SCHEMA_VERSION + 1}, .* up to {SCHEMA_VERSION}") as caught:
        decode(raw)
    assert caught.value.mend == "upgrade draftloop on this side"


def test_a_missing_field_a_wrong_type_and_a_record_without_schema_are_undecodable() -> None:
    fields = msgspec.to_builtins(RECORD, builtin_types=(bytes,))
    missing = {name: value for name, value in fields.items() if name != "tenant"}
    without_schema = {name: value for name, value in fields.items() if name != "schema"}
    for bad in (missing, {**fields, "time_ms": "noon"}, {**fields, "finish_reason": "eos"}, without_schema):
        with pytest.raises(UndecodableRecordError):
            decode(msgspec.msgpack.encode(bad))
    assert decode(msgspec.msgpack.encode(fields)) == RECORD


def test_a_field_unknown_to_this_version_is_dropped() -> None:
    fields = msgspec.to_builtins(RECORD, builtin_types=(bytes,))
    assert decode(msgspec.msgpack.encode({**fields, "later": "addition"})) == RECORD


def test_an_undecodable_record_s_error_does_not_quote_it() -> None:
    fields = msgspec.to_builtins(RECORD, builtin_types=(bytes,))
    with pytest.raises(UndecodableRecordError) as caught:
        decode(msgspec.msgpack.encode({**fields, "subject": 3, "tenant": "marker-7f3"}))
    assert "marker-7f3" not in str(caught.value)


@given(IDS)
def test_ids_are_little_endian_32_bit(ids: list[int]) -> None:
    assert pack_ids(ids) == struct.pack(f"<{len(ids)}I", *ids)
    assert unpack_ids(pack_ids(ids)) == ids


@given(st.lists(st.floats(width=32), max_size=8))
def test_floats_are_little_endian_32_bit(values: list[float]) -> None:
    assert pack_floats(values) == struct.pack(f"<{len(values)}f", *values)
    back = unpack_floats(pack_floats(values))
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(back, values, strict=True))


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_an_id_that_does_not_fit_is_an_overflow(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack_ids(ids)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_ragged_length_is_undecodable(length: int) -> None:
    with pytest.raises(UndecodableRecordError, match=f"{length} bytes: not a multiple of 4"):
        unpack_ids(b"\0" * length)
    with pytest.raises(UndecodableRecordError, match=f"{length} bytes: not a multiple of 4"):
        unpack_floats(b"\0" * length)


def test_tau_counts_emitted_tokens_per_step_and_readings_subtract() -> None:
    early, late = SpecCounters(10, 20, 40, 10), SpecCounters(30, 80, 120, 50)
    assert late.since(early) == SpecCounters(20, 60, 80, 40)
    assert late.since(early).tau == 3.0
    assert SpecCounters().tau == 1.0


def test_a_record_nested_without_end_is_undecodable() -> None:
    with pytest.raises(UndecodableRecordError):
        decode(b"\x82\xa1a" + b"\x91" * 100_000 + b"\xc0\xa6schema\x01")


def test_a_wrong_value_of_a_record_is_not_repeated_in_its_error() -> None:
    good = msgspec.msgpack.decode(encode(RECORD))
    for field in ("finish_reason", "time_ms", "sampling"):
        with pytest.raises(UndecodableRecordError) as error:
            decode(msgspec.msgpack.encode({**good, field: "what the user asked"}))
        assert "what the user asked" not in str(error.value)
        assert error.value.__cause__ is None
        assert field in str(error.value)

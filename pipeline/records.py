"""Wire records of the capture log and their codec: msgpack, schema version first, unknown fields kept out by name."""

from __future__ import annotations

import array
import re
import sys
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from draftloop.pipeline.errors import NewerSchemaError, UndecodableRecordError

SCHEMA_VERSION = 1

FinishReason = Literal["stop", "length", "abort"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters as the engine applied them; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 0
    seed: int | None = None


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """Why this request may be kept: the permission in force when it was captured."""

    purpose: str  # "train" is the only one that reaches a snapshot
    policy_version: str
    basis: str  # who decided: "tenant-policy", "gateway", ...


class CapturedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One finished choice of one request, as the engine ran it. Ids are little-endian uint32."""

    schema: int = SCHEMA_VERSION
    record_id: str
    time_ms: int  # Unix time of the finish, milliseconds
    conversation_id: str
    tenant: str
    subject: str  # pseudonymous
    consent: Consent
    target: str  # Fingerprint.digest
    drafter_version: str | None  # None: nothing drafted but the engine's floor
    prompt_ids: bytes
    output_ids: bytes
    finish_reason: FinishReason
    sampling: Sampling
    logprobs: bytes | None = None  # float32 LE, one per output token, as the engine tells them
    accepted: tuple[int, ...] = ()  # accepted draft tokens of each target step after prefill; (): not told
    drafted: tuple[int, ...] = ()  # proposed draft tokens of the same steps; (): not told
    slices: dict[str, str] = msgspec.field(default_factory=dict)  # language, template mode, route, domain
    redaction: tuple[str, ...] = ()


class SpecCounters(msgspec.Struct, frozen=True):
    """Speculation counters since the engine started. tau = num_emitted / num_steps."""

    num_steps: int = 0  # target steps after prefill, one per sequence and step
    num_emitted: int = 0  # tokens users got from those steps, bonus tokens included, clipped at stop and length
    num_drafted: int = 0
    num_accepted: int = 0

    def since(self, earlier: SpecCounters) -> SpecCounters:
        """The difference to an earlier reading."""
        return SpecCounters(
            self.num_steps - earlier.num_steps,
            self.num_emitted - earlier.num_emitted,
            self.num_drafted - earlier.num_drafted,
            self.num_accepted - earlier.num_accepted,
        )

    @property
    def tau(self) -> float:
        """Tokens emitted per target step; 1.0 where nothing was measured."""
        return self.num_emitted / self.num_steps if self.num_steps else 1.0


class ProbeResult(msgspec.Struct, frozen=True):
    """Greedy outputs of the canary prompts, and what they cost in target steps."""

    output_ids: tuple[tuple[int, ...], ...]
    margins: tuple[tuple[float, ...], ...]  # per token: target logit of the best minus the second best token
    counters: SpecCounters


class Condition(msgspec.Struct, frozen=True):
    """What an engine says of itself."""

    boot_id: str = ""  # another one: the process was restarted
    version: str | None = None  # of the drafter; None: none, or not known
    digest: str = ""  # of its folder; empty: not known
    tensors: str = ""  # of its loaded tensors; empty: not known
    restart_needed: str | None = None  # why only a restart helps


class Swapped(msgspec.Struct, frozen=True):
    """A drafter got into an engine."""

    tensors: str  # digest of the loaded tensors, as its manifest names them; "" without a drafter
    pause_ms: float  # how long requests stood still


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CapturedRequest)


class _SchemaOnly(msgspec.Struct):
    schema: int


N = TypeVar("N", int, float)
_schema_decoder = msgspec.msgpack.Decoder(_SchemaOnly)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids to little-endian uint32 bytes. Raises OverflowError for a negative or over-wide id."""
    return _little_endian(array.array("I", ids)).tobytes()


def unpack_ids(raw: bytes) -> list[int]:
    """The inverse of pack_ids. Raises UndecodableRecordError for a ragged length."""
    return _unpacked(array.array("I"), raw, "token ids").tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """Floats to little-endian float32 bytes."""
    return _little_endian(array.array("f", values)).tobytes()


def unpack_floats(raw: bytes) -> list[float]:
    """The inverse of pack_floats. Raises UndecodableRecordError for a ragged length."""
    return _unpacked(array.array("f"), raw, "floats").tolist()


def _unpacked(into: array.array[N], raw: bytes, what: str) -> array.array[N]:
    if len(raw) % 4:
        raise UndecodableRecordError(f"{what} of {len(raw)} bytes: not a multiple of 4")
    into.frombytes(raw)
    return _little_endian(into)


def _little_endian(numbers: array.array[N]) -> array.array[N]:
    """Between the machine's byte order and the wire's; its own inverse."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def encode(record: CapturedRequest) -> bytes:
    """A record as it goes into the log."""
    return _encoder.encode(record)


_FOREIGN = "find out who else may write this topic (Kafka: `draftloop access verify`); curation sets the record aside"


_WRONG = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)


def decode(raw: bytes) -> CapturedRequest:
    """A record as it comes out of the log. Raises NewerSchemaError, UndecodableRecordError."""
    try:
        schema = _schema_decoder.decode(raw).schema
    except _WRONG as error:
        raise UndecodableRecordError(
            f"not a capture record ({len(raw)} bytes): {_told(error)}", mend=_FOREIGN
        ) from None
    if schema > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"record of schema {schema}, this draftloop reads up to {SCHEMA_VERSION}",
            mend="upgrade draftloop on this side",
        )
    try:
        return _decoder.decode(raw)
    except _WRONG as error:
        raise UndecodableRecordError(
            f"capture record of schema {schema} does not decode: {_told(error)}", mend=_FOREIGN
        ) from None


def _told(error: Exception) -> str:
    """What is wrong with a record without anything of it: the decoder quotes a wrong value, which may be content."""
    return re.sub(r"'.*'", "'...'", str(error), flags=re.DOTALL)

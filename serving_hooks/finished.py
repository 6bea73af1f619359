"""A finished request as an engine hands it in, and the bytes it becomes."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftloop.pipeline.errors import UndecodableRecordError
from draftloop.pipeline.records import (
    CapturedRequest,
    Consent,
    FinishReason,
    Sampling,
    decode,
    encode,
    pack_floats,
    pack_ids,
)
from draftloop.pipeline.stream.policy import Assertion


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished choice of a request. The hook keeps nothing that the engine can change later."""

    request_id: str
    conversation_id: str
    tenant: str
    subject: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    finish_reason: FinishReason
    sampling: Sampling
    logprobs: Sequence[float] | None = None
    accepted: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    drafter_version: str | None = None
    slices: Mapping[str, str] = field(default_factory=dict)
    choice: int = 0
    time_ms: int | None = None  # None: the moment of the offer
    asserted: Assertion | None = None  # what somebody the server trusts says about this request

    @property
    def least_bytes(self) -> int:
        """What it takes at least, told from lengths alone."""
        logprobs = len(self.logprobs) if self.logprobs is not None else 0
        return 4 * (len(self.prompt_ids) + len(self.output_ids) + logprobs) + len(self.accepted) + len(self.drafted)


class Held(NamedTuple):
    """A finished request as it waits to be packed: whatever the engine may change later is a copy."""

    request: FinishedRequest
    consent: Consent
    time_ms: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float] | None
    slices: dict[str, str]

    @property
    def most_bytes(self) -> int:
        """The memory it takes at most: an id is an object of 28 bytes and its place in a tuple."""
        request = self.request
        words = len(request.request_id) + len(request.conversation_id) + len(request.tenant) + len(request.subject)
        words += sum(len(key) + len(value) for key, value in self.slices.items())
        items = len(self.prompt_ids) + len(self.output_ids) + len(self.logprobs or ())
        return _HELD_BYTES + 4 * words + _ITEM_BYTES * (items + len(request.accepted) + len(request.drafted))


_HELD_BYTES = 2048  # the objects around: request, strings, tuples, slices; a test measures it
_ITEM_BYTES = 40


def hold(request: FinishedRequest, consent: Consent) -> Held | None:
    """What can wait; None for what cannot be copied fast and must be packed at once. Raises TypeError: no request."""
    ids = _fixed(request.prompt_ids), _fixed(request.output_ids)
    logprobs = None if request.logprobs is None else _fixed(request.logprobs)
    if ids[0] is None or ids[1] is None or (logprobs is None) != (request.logprobs is None):
        return None
    if type(request.slices) is not dict or type(request.accepted) is not tuple or type(request.drafted) is not tuple:
        return None
    return Held(request, consent, _moment(request), ids[0], ids[1], logprobs, request.slices.copy())


def _fixed(values: Any) -> tuple[Any, ...] | None:
    kind = type(values)
    if kind is tuple:
        return values  # type: ignore[no-any-return]
    return tuple(values) if kind is list else None


def _moment(request: FinishedRequest) -> int:
    return operator.index(request.time_ms) if request.time_ms is not None else time.time_ns() // 1_000_000


def pack(request: FinishedRequest, consent: Consent, target: str) -> bytes:
    """The record's final bytes, which a reader can read. Raises OverflowError, TypeError, ValueError: no request."""
    logprobs = None if request.logprobs is None else _numbers(request.logprobs)
    ids = _numbers(request.prompt_ids), _numbers(request.output_ids)
    return pack_held(Held(request, consent, _moment(request), *ids, logprobs, dict(request.slices)), target)


def pack_held(held: Held, target: str) -> bytes:
    """As pack, of what has waited."""
    request = held.request
    choice = operator.index(request.choice)
    value = encode(
        CapturedRequest(
            record_id=request.request_id if choice == 0 else f"{request.request_id}-{choice}",
            time_ms=held.time_ms,
            conversation_id=request.conversation_id,
            tenant=request.tenant,
            subject=request.subject,
            consent=held.consent,
            target=target,
            drafter_version=request.drafter_version,
            prompt_ids=pack_ids(held.prompt_ids),
            output_ids=pack_ids(held.output_ids),
            finish_reason=request.finish_reason,
            sampling=request.sampling,
            logprobs=pack_floats(held.logprobs) or None if held.logprobs is not None else None,
            accepted=request.accepted,
            drafted=request.drafted,
            slices=held.slices,
        )
    )
    # The encoder takes whatever a field holds, the decoder does not. It needs a few microseconds, ids being bytes.
    try:
        decode(value)
    except UndecodableRecordError as error:
        raise ValueError(error.message) from None
    return value


def _numbers(values: Sequence[Any]) -> Sequence[Any]:
    """What array.array takes item by item: of a numpy array that would be slow, and of bytes it would be their bits."""
    if isinstance(values, bytes | bytearray | memoryview):
        raise TypeError("bytes are no numbers")
    listed = getattr(values, "tolist", None)
    return values if listed is None else listed()

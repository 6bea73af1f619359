"""A finished request as an engine hands it in, and the bytes it becomes."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
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


class Later(tuple[Callable[[], FinishedRequest], Consent, int]):
    """A finished request that is put together where it is packed: (make, consent, Unix time in ms).

    A plain tuple underneath, since it is made on the serving path. `make` holds nothing that the engine changes.
    """

    __slots__ = ()

    def packed(self, target: str) -> tuple[bytes, bytes]:
        """Key and value of the entry. Raises AttributeError, OverflowError, TypeError, ValueError: no request."""
        make, consent, time_ms = self
        request = make()
        return request.conversation_id.encode(), pack(request, consent, target, time_ms=time_ms)


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
        """The memory it takes at most. Raises TypeError: no request."""
        request = self.request
        words = len(request.request_id) + len(request.conversation_id) + len(request.tenant) + len(request.subject)
        for key, value in self.slices.items():
            words += len(key) + len(value)
        items = len(self.prompt_ids) + len(self.output_ids) + len(self.logprobs or ())
        return most_bytes(items + len(request.accepted) + len(request.drafted), words)

    def packed(self, target: str) -> tuple[bytes, bytes]:
        """Key and value of the entry. Raises AttributeError, OverflowError, TypeError, ValueError: no request."""
        return self.request.conversation_id.encode(), _encoded(self, target)


def most_bytes(num_items: int, num_letters: int) -> int:
    """The memory of a request that waits: an id is an object of 28 bytes and its place in a tuple."""
    return 2048 + 4 * num_letters + 40 * num_items  # 2048: the objects around


def hold(request: FinishedRequest, consent: Consent) -> Held | None:
    """What can wait; None for what cannot be copied fast and must be packed at once. Raises TypeError: no request."""
    prompt_ids, output_ids, logprobs = request.prompt_ids, request.output_ids, request.logprobs
    if type(prompt_ids) not in _FAST or type(output_ids) not in _FAST or type(request.slices) is not dict:
        return None
    if type(request.accepted) is not tuple or type(request.drafted) is not tuple:
        return None
    if logprobs is not None:
        if type(logprobs) not in _FAST:
            return None
        logprobs = tuple(logprobs)
    return Held(
        request, consent, moment(request.time_ms), tuple(prompt_ids), tuple(output_ids), logprobs, request.slices.copy()
    )


_FAST = (list, tuple)


def moment(time_ms: int | None = None) -> int:
    """Unix time in ms; now, where none is given."""
    return operator.index(time_ms) if time_ms is not None else time.time_ns() // 1_000_000


def pack(request: FinishedRequest, consent: Consent, target: str, *, time_ms: int | None = None) -> bytes:
    """The record's final bytes, which a reader can read. Raises OverflowError, TypeError, ValueError: no request."""
    logprobs = None if request.logprobs is None else _numbers(request.logprobs)
    ids = _numbers(request.prompt_ids), _numbers(request.output_ids)
    when = moment(time_ms if request.time_ms is None else request.time_ms)
    return _encoded(Held(request, consent, when, *ids, logprobs, dict(request.slices)), target)


def _encoded(held: Held, target: str) -> bytes:
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

"""A finished request as an engine hands it in, and the bytes it becomes."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished choice of a request. The hook keeps nothing of it: the offer packs."""

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

    @property
    def least_bytes(self) -> int:
        """What it takes at least, told from lengths alone."""
        logprobs = len(self.logprobs) if self.logprobs is not None else 0
        return 4 * (len(self.prompt_ids) + len(self.output_ids) + logprobs) + len(self.accepted) + len(self.drafted)


def pack(request: FinishedRequest, consent: Consent, target: str) -> bytes:
    """The record's final bytes, which a reader can read. Raises OverflowError, TypeError, ValueError: no request."""
    choice = operator.index(request.choice)
    value = encode(
        CapturedRequest(
            record_id=request.request_id if choice == 0 else f"{request.request_id}-{choice}",
            time_ms=operator.index(request.time_ms) if request.time_ms is not None else time.time_ns() // 1_000_000,
            conversation_id=request.conversation_id,
            tenant=request.tenant,
            subject=request.subject,
            consent=consent,
            target=target,
            drafter_version=request.drafter_version,
            prompt_ids=pack_ids(_numbers(request.prompt_ids)),
            output_ids=pack_ids(_numbers(request.output_ids)),
            finish_reason=request.finish_reason,
            sampling=request.sampling,
            logprobs=pack_floats(_numbers(request.logprobs)) or None if request.logprobs is not None else None,
            accepted=request.accepted,
            drafted=request.drafted,
            slices=dict(request.slices),
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

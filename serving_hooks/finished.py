"""A finished request as an engine hands it in, and the bytes it becomes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from draftloop.pipeline.records import (
    CapturedRequest,
    Consent,
    FinishReason,
    Sampling,
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
        logprobs = len(self.logprobs) if self.logprobs else 0
        return 4 * (len(self.prompt_ids) + len(self.output_ids) + logprobs) + len(self.accepted) + len(self.drafted)


def pack(request: FinishedRequest, consent: Consent, target: str) -> bytes:
    """The record's final bytes. Raises OverflowError, TypeError, ValueError for what is no request."""
    return encode(
        CapturedRequest(
            record_id=request.request_id if request.choice == 0 else f"{request.request_id}-{request.choice}",
            time_ms=request.time_ms if request.time_ms is not None else time.time_ns() // 1_000_000,
            conversation_id=request.conversation_id,
            tenant=request.tenant,
            subject=request.subject,
            consent=consent,
            target=target,
            drafter_version=request.drafter_version,
            prompt_ids=pack_ids(request.prompt_ids),
            output_ids=pack_ids(request.output_ids),
            finish_reason=request.finish_reason,
            sampling=request.sampling,
            logprobs=pack_floats(request.logprobs) if request.logprobs else None,
            accepted=request.accepted,
            drafted=request.drafted,
            slices=dict(request.slices),
        )
    )

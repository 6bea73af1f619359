"""What goes into the embedded engine and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftloop.pipeline.records import FinishReason, Sampling


class EngineConfig(BaseModel):
    """Sizes of the embedded engine; fixed for as long as it runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_batch: int = Field(default=32, ge=1)
    max_sequence: int = Field(default=512, ge=2)  # prompt and output tokens of one request
    num_speculative_tokens: int = Field(default=4, ge=1, le=16)
    floor: Literal["none", "ngram"] = "ngram"  # what drafts while no drafter is loaded
    capture_logprobs: bool = False
    pack_weights: bool = True  # bf16 on the CPU: faster steps for the weights' memory once more
    prefill_tokens: int = Field(default=4096, ge=1)  # padded prompt positions of a forward; a longer prompt goes alone


@dataclass(frozen=True)
class Request:
    """One request. `sampling.max_tokens` 0 means: as many as fit into the engine's max_sequence."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    conversation_id: str = ""
    tenant: str = ""
    subject: str = ""
    slices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One finished request.

    `accepted` and `drafted` have one entry a target step after prefill. `accepted` counts emitted tokens minus one: a
    step that a stop token or the length cuts short counts what the user got, so that
    sum(accepted) + len(accepted) == len(output_ids) - 1 always (for an output of at least one token).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    drafter_version: str | None
    logprobs: tuple[float, ...] | None  # of the distribution sampled from; greedy: of the unfiltered one

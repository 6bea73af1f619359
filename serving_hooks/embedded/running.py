"""The state of one request from submission to its completion."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from draftloop.pipeline.records import FinishReason
from draftloop.serving_hooks.embedded.types import Completion, Request

GREEDY_BELOW = 1e-5  # logits divided by less leave the range of fp32; vLLM's limit too


@dataclass(eq=False)
class Running:
    """One request. Its slot is its index in the core's list of active requests."""

    request: Request
    limit: int  # output tokens at most
    future: Future[Completion]
    probing: bool = False  # neither captured nor counted; margins kept
    tokens: list[int] = field(default_factory=list)  # prompt and output; the last one is not yet in the target's cache
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    cancelled: bool = False
    finish: FinishReason | None = None
    drafter_version: str | None = None  # live at the end
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        if not self.greedy:
            self.generator = torch.Generator().manual_seed(_seed_of(self.request))

    @property
    def greedy(self) -> bool:
        return self.request.sampling.temperature < GREEDY_BELOW

    @property
    def cached(self) -> int:
        """Tokens in the target's cache once the prompt was processed."""
        return len(self.tokens) - 1

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    def emit(self, ids: list[int], stop_ids: frozenset[int]) -> int:
        """Append a step's tokens, cut after the first stop token and at the limit; returns how many were taken."""
        taken = 0
        for token in ids[: self.limit - self.num_output]:
            self.tokens.append(token)
            taken += 1
            if token in stop_ids:
                self.finish = "stop"
                return taken
        if self.num_output == self.limit:
            self.finish = "length"
        return taken

    def completion(self) -> Completion:
        """The result; only for a finished request."""
        assert self.finish is not None
        return Completion(
            request_id=self.request.request_id,
            prompt_ids=self.request.prompt_ids,
            output_ids=tuple(self.tokens[len(self.request.prompt_ids) :]),
            finish_reason=self.finish,
            accepted=tuple(self.accepted),
            drafted=tuple(self.drafted),
            drafter_version=self.drafter_version,
            logprobs=tuple(self.logprobs) if self.logprobs else None,
        )


def _seed_of(request: Request) -> int:
    """The request's own seed, or one made from its id: the same request always samples the same way."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return int.from_bytes(hashlib.sha256(request.request_id.encode()).digest()[:7], "big")

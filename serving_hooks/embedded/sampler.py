"""From the target's logits and the drafts of one step to the tokens that each request emits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.verify import filtered_probs, verify_greedy, verify_sampled
from draftloop.serving_hooks.embedded.running import Running


class Chosen(NamedTuple):
    """The tokens of one step, before they are cut at a stop token or the length."""

    ids: list[list[int]]  # accepted drafts and the token that follows them, per request
    logprobs: list[list[float]] | None
    margins: list[list[float]] | None  # best minus second best logit, per token


def choose(
    running: Sequence[Running], logits: Tensor, drafts: Sequence[Sequence[int]], *, logprobs: bool, margins: bool
) -> Chosen:
    """Verify one step. logits [B, T, V]; drafts: at most T - 1 token ids per request."""
    width = logits.shape[1]
    padded = torch.tensor([[*ids, *[0] * (width - 1 - len(ids))] for ids in drafts], dtype=torch.int64)
    padded = padded.view(len(drafts), width - 1).to(logits.device)
    counts = torch.tensor([len(ids) for ids in drafts], device=logits.device)
    greedy = [index for index, state in enumerate(running) if state.greedy]
    sampled = [index for index, state in enumerate(running) if not state.greedy]
    ids: list[list[int]] = [[] for _ in running]
    probs: Tensor | None = None
    if greedy:
        pick = slice(None) if not sampled else torch.tensor(greedy, device=logits.device)
        accepted, following = verify_greedy(padded[pick], logits[pick].argmax(-1), counts[pick])
        for index, length, token in zip(greedy, accepted.tolist(), following.tolist(), strict=True):
            ids[index] = [*drafts[index][:length], token]
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        probs = _distribution([running[index] for index in sampled], logits[rows])
        uniforms, final = _draw([running[index] for index in sampled], counts[rows].tolist(), width - 1, logits.device)
        accepted, following = verify_sampled(probs, padded[rows], counts[rows], uniforms, final)
        for index, length, token in zip(sampled, accepted.tolist(), following.tolist(), strict=True):
            ids[index] = [*drafts[index][:length], token]
    return Chosen(
        ids,
        _logprobs(ids, logits, sampled, probs) if logprobs else None,
        _margins(ids, logits) if margins else None,
    )


def _distribution(running: Sequence[Running], logits: Tensor) -> Tensor:
    """What each sampled request draws from: fp32 [R, T, V]."""
    settings = [state.request.sampling for state in running]
    return filtered_probs(
        logits,
        torch.tensor([setting.temperature for setting in settings], device=logits.device),
        torch.tensor([setting.top_k for setting in settings], device=logits.device),
        torch.tensor([setting.top_p for setting in settings], device=logits.device),
    )


def _draw(running: Sequence[Running], counts: Sequence[int], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One number a draft and one for the last token, from each request's own generator: batch mates change nothing."""
    uniforms = torch.ones(len(running), width, dtype=torch.float64)
    final = torch.empty(len(running), dtype=torch.float64)
    for row, (state, count) in enumerate(zip(running, counts, strict=True)):
        numbers = torch.rand(count + 1, generator=state.generator, dtype=torch.float64)
        uniforms[row, :count] = numbers[:count]
        final[row] = numbers[count]
    return uniforms.to(device), final.to(device)


def _flat(ids: Sequence[Sequence[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows (request * width + position) and tokens of everything emitted."""
    rows = [index * width + position for index, tokens in enumerate(ids) for position in range(len(tokens))]
    return torch.tensor(rows, device=device), torch.tensor([token for tokens in ids for token in tokens], device=device)


def _split(values: list[float], ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """Cut a flat list back into one list a request."""
    pieces, start = [], 0
    for tokens in ids:
        pieces.append(values[start : start + len(tokens)])
        start += len(tokens)
    return pieces


def _logprobs(
    ids: Sequence[Sequence[int]], logits: Tensor, sampled: Sequence[int], probs: Tensor | None
) -> list[list[float]]:
    rows, tokens = _flat(ids, logits.shape[1], logits.device)
    wide = logits.flatten(0, 1)[rows].float()
    values = (wide.gather(1, tokens.unsqueeze(1)).squeeze(1) - wide.logsumexp(dim=1)).tolist()
    pieces = _split(values, ids)
    if probs is not None:
        for row, index in enumerate(sampled):
            picked = torch.tensor(ids[index], device=logits.device)
            pieces[index] = probs[row, torch.arange(len(picked), device=logits.device), picked].log().tolist()
    return pieces


def _margins(ids: Sequence[Sequence[int]], logits: Tensor) -> list[list[float]]:
    rows, _ = _flat(ids, logits.shape[1], logits.device)
    best = logits.flatten(0, 1)[rows].float().topk(2, dim=1).values
    return _split((best[:, 0] - best[:, 1]).tolist(), ids)

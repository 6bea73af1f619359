"""Lossless verification of a drafted chain (arXiv 2211.17192, 2302.01318); drafts are one-hot (greedy) proposals.

Shapes: B sequences, K drafted tokens, T = K + 1 target positions, V vocabulary. Row t of the target follows draft
t - 1, so row `accepted` holds the distribution of the token that ends the step. Of ragged drafts, the first
`num_drafts[b] <= K` count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NUCLEUS_GUESS = 256  # tokens looked at before a whole vocabulary is sorted


class Verified(NamedTuple):
    """What one step keeps: `accepted` drafts and then `next_ids`."""

    accepted: Tensor  # int64 [B]
    next_ids: Tensor  # int64 [B]


def match_length(drafts: Tensor, targets: Tensor, num_drafts: Tensor) -> Tensor:
    """Longest prefix in which drafts [B, K] equal targets [B, >= K], at most num_drafts [B]; int64 [B]."""
    width = drafts.shape[1]
    inside = torch.arange(width, device=drafts.device) < num_drafts.unsqueeze(1)
    same = (drafts == targets[:, :width]) & inside
    return same.to(torch.int64).cumprod(dim=1).sum(dim=1)


def verify_greedy(drafts: Tensor, target_ids: Tensor, num_drafts: Tensor) -> Verified:
    """Greedy acceptance. target_ids [B, T]: the target's argmax in each row."""
    accepted = match_length(drafts, target_ids, num_drafts)
    return Verified(accepted, target_ids.gather(1, accepted.unsqueeze(1)).squeeze(1))


def verify_greedy_plain(drafts: Tensor, target_ids: Tensor, num_drafts: Tensor) -> Verified:
    """Reference of verify_greedy, one token at a time."""
    accepted, next_ids = [], []
    for row in range(drafts.shape[0]):
        count = 0
        while count < int(num_drafts[row]) and int(drafts[row, count]) == int(target_ids[row, count]):
            count += 1
        accepted.append(count)
        next_ids.append(int(target_ids[row, count]))
    return Verified(torch.tensor(accepted), torch.tensor(next_ids))


def verify_sampled(probs: Tensor, drafts: Tensor, num_drafts: Tensor, uniforms: Tensor, final: Tensor) -> Verified:
    """Rejection sampling: draft j is accepted with probability probs[b, j, draft]; the first refused one is replaced by
    a sample of the residual (the same row without the draft); a wholly accepted chain gets a sample of its last row.

    probs [B, T, V] filtered and normalised; drafts [B, K]; uniforms [B, K] and final [B] in [0, 1).
    """
    width = drafts.shape[1]
    rows = torch.arange(drafts.shape[0], device=drafts.device)
    of_draft = probs[:, :width].gather(2, drafts.unsqueeze(2)).squeeze(2)
    inside = torch.arange(width, device=drafts.device) < num_drafts.unsqueeze(1)
    kept = (uniforms < of_draft) & inside
    accepted = kept.to(torch.int64).cumprod(dim=1).sum(dim=1)
    residual = probs[rows, accepted]
    refused = (accepted < num_drafts).nonzero().squeeze(1)
    residual[refused, drafts[refused, accepted[refused]]] = 0.0
    return Verified(accepted, sample_inverse(residual, final))


def verify_sampled_plain(
    probs: Tensor, drafts: Tensor, num_drafts: Tensor, uniforms: Tensor, final: Tensor
) -> Verified:
    """Reference of verify_sampled, one token at a time."""
    accepted, next_ids = [], []
    for row in range(drafts.shape[0]):
        count = 0
        while count < int(num_drafts[row]) and uniforms[row, count] < probs[row, count, int(drafts[row, count])]:
            count += 1
        weights = probs[row, count].double().tolist()
        if count < int(num_drafts[row]):
            weights[int(drafts[row, count])] = 0.0
        point, passed, chosen = float(final[row]) * sum(weights), 0.0, 0
        for token, weight in enumerate(weights):
            if weight > 0.0:
                chosen = token
                passed += weight
                if passed > point:
                    break
        accepted.append(count)
        next_ids.append(chosen)
    return Verified(torch.tensor(accepted), torch.tensor(next_ids))


def sample_inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index a row by inverse transform. weights [B, V] >= 0, not normalised; uniforms [B] in [0, 1); int64 [B].

    An index of weight 0 is never returned.
    """
    heaped = weights.double().cumsum(dim=1)
    point = uniforms.double() * heaped[:, -1]
    index = torch.searchsorted(heaped, point.unsqueeze(1), right=True).squeeze(1)
    last = weights.shape[1] - 1 - (weights > 0).flip(1).to(torch.uint8).argmax(dim=1)
    return torch.minimum(index, last)


def filtered_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """What is sampled from: temperature, then top-k, then the smallest set of mass >= top-p; renormalised.

    logits [B, T, V]; temperature [B] > 0; top_k int64 [B], 0 = off; top_p [B], 1 = off. fp32 [B, T, V].
    """
    probs = torch.softmax(logits.float() / temperature.float().view(-1, 1, 1), dim=-1)
    limited = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(1)
    if limited.numel():
        length = logits.shape[1]
        flat = probs[limited].flatten(0, 1)
        per_row = (setting[limited].repeat_interleave(length) for setting in (top_k, top_p.float()))
        probs[limited] = _nucleus(flat, *per_row).view(-1, length, logits.shape[2])
    return probs


def _nucleus(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """probs [R, V] cut to top-k then top-p. Sorts whole rows only where the best few do not reach."""
    size = probs.shape[1]
    limit = torch.where(top_k > 0, top_k.clamp(max=size), torch.full_like(top_k, size))
    count = min(NUCLEUS_GUESS, size)
    values, order = probs.topk(count, dim=1)
    within = (limit <= count) | ((limit == size) & (top_p < 1) & (values.sum(dim=1) >= top_p))
    if not bool(within.all()):
        values, order = probs.sort(dim=1, descending=True)
    best = values * (torch.arange(values.shape[1], device=probs.device) < limit.unsqueeze(1))
    # Top-p is a share of what top-k left; where top-k cut nothing that is the whole row, seen or not.
    mass = torch.where(limit < size, best.sum(dim=1), 1.0)
    before = best.cumsum(dim=1) - best
    best = best * ((before < (top_p * mass).unsqueeze(1)) | (top_p >= 1).unsqueeze(1))
    kept = torch.zeros_like(probs).scatter_(1, order, best)
    return kept / kept.sum(dim=1, keepdim=True)


def filtered_probs_plain(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Reference of filtered_probs for one row [V], in double precision."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    order = sorted(range(len(probs)), key=lambda token: -float(probs[token]))
    if top_k > 0:
        order = order[:top_k]
    whole, passed, kept = sum(float(probs[token]) for token in order), 0.0, []
    for token in order:
        if top_p < 1 and passed >= top_p * whole:
            break
        kept.append(token)
        passed += float(probs[token])
    result = torch.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()

"""Exact replay of speculative decoding on logged text: the anchors serving visits, and the drafts it accepts there.

Shapes: B texts, N anchors, K draft depths. A text is the tokens that speculation emitted (everything after prefill's
first token), right-padded to N. Anchor t is the moment before tokens[t]; its draft at depth d competes with
tokens[t + d]. A step at anchor t that accepts L drafts emits L + 1 tokens, clipped at the end of the text, and
continues at anchor t + L + 1.

Every tensor function has a plain Python twin (`*_plain`) for one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NO_DRAFT = -1  # a token id no text contains: pads drafters that propose fewer than K


class Walk(NamedTuple):
    """The greedy walk over each text."""

    visited: Tensor  # bool [B, N]: anchors at which a step starts
    num_steps: Tensor  # int64 [B]
    at_least: Tensor  # int64 [B, K]: steps that accepted >= k + 1 drafts


class Expected(NamedTuple):
    """The same in expectation, for drafters that sample."""

    visit: Tensor  # float64 [B, N]: probability that a step starts at each anchor
    num_steps: Tensor  # float64 [B]
    at_least: Tensor  # float64 [B, K]


def match_lengths(drafts: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Longest accepted prefix of each anchor's drafts. [B, N, K], [B, N], [B] -> int64 [B, N]; 0 behind a text's end.

    A draft beyond the end of its text never matches, so no step accepts more than the text still holds.
    """
    num_anchors, depths = drafts.shape[-2:]
    positions = _competing_positions(num_anchors, depths, tokens.device)
    logged = tokens[:, positions.clamp(max=num_anchors - 1)]
    equal = (drafts == logged) & (positions < lengths[:, None, None])
    return equal.long().cumprod(-1).sum(-1)


def match_lengths_plain(drafts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[int]:
    """Plain twin of match_lengths for one unpadded text."""
    matches = []
    for anchor, proposed in enumerate(drafts):
        length = 0
        while length < len(proposed) and anchor + length < len(tokens) and proposed[length] == tokens[anchor + length]:
            length += 1
        matches.append(length)
    return matches


def greedy_walk(matches: Tensor, lengths: Tensor, *, k: int) -> Walk:
    """Walk anchor -> anchor + match + 1 from anchor 0 to the end of each text. matches int64 [B, N], lengths [B].

    Pointer doubling instead of a loop over steps: after r rounds every anchor within 2^r - 1 steps is marked.
    """
    batch, num_anchors = matches.shape
    jump = torch.arange(num_anchors, device=matches.device) + matches + 1
    jump = torch.cat([jump, jump.new_full((batch, 1), num_anchors)], dim=1).clamp(max=num_anchors)
    visited = torch.zeros_like(jump)
    visited[:, 0] = 1
    for _ in range(num_anchors.bit_length()):
        visited = visited.scatter_reduce(1, jump, visited, "amax")
        jump = jump.gather(1, jump)
    inside = torch.arange(num_anchors, device=matches.device) < lengths[:, None]
    steps = visited[:, :num_anchors].bool() & inside
    depth = torch.arange(1, k + 1, device=matches.device)
    at_least = ((matches[..., None] >= depth) & steps[..., None]).sum(1)
    return Walk(steps, steps.sum(1), at_least)


def greedy_walk_plain(matches: Sequence[int], *, k: int) -> tuple[list[int], list[int]]:
    """Plain twin of greedy_walk for one unpadded text: visited anchors and steps that accepted >= 1..k drafts."""
    visited, at_least, anchor = [], [0] * k, 0
    while anchor < len(matches):
        visited.append(anchor)
        for depth in range(matches[anchor]):
            at_least[depth] += 1
        anchor += matches[anchor] + 1
    return visited, at_least


def acceptance_rates(draft_logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """Probability that the logged token was an accepted draft, given that it was emitted: min(1, q / p), elementwise.

    Both are log-probabilities of the logged token, of the distributions actually sampled from (filtered, renormalised).
    """
    return (draft_logprobs.double() - target_logprobs.double()).clamp(max=0).exp()


def expected_steps(rates: Tensor, lengths: Tensor) -> Tensor:
    """Expected target steps V(0) per text for drafters that sample. rates [B, N, K] in [0, 1] -> float64 [B].

    V(i) = 1 + sum_l P(L_i = l) V(i + l + 1), V(end) = 0, P(L_i >= l) = prod of the first l rates. Equals the greedy
    walk's steps where the rates are 0 or 1. One pass from the back: O(N K), no sampling noise.
    """
    batch, num_anchors, depths = rates.shape
    stop = _stop_probabilities(rates, lengths)
    value = torch.zeros(batch, num_anchors + depths + 1, dtype=torch.float64, device=rates.device)
    for anchor in range(num_anchors - 1, -1, -1):
        ahead = value[:, anchor + 1 : anchor + depths + 2]
        value[:, anchor] = (1 + (stop[:, anchor] * ahead).sum(-1)) * (anchor < lengths)
    return value[:, 0]


def expected_steps_plain(rates: Sequence[Sequence[float]]) -> float:
    """Plain twin of expected_steps for one unpadded text, by enumerating L at every anchor."""
    num_anchors = len(rates)
    value = [0.0] * (num_anchors + 1)
    for anchor in range(num_anchors - 1, -1, -1):
        alive, total = 1.0, 1.0
        for depth, rate in enumerate(rates[anchor]):
            total += alive * (1 - rate) * value[min(anchor + depth + 1, num_anchors)]
            alive *= rate
        value[anchor] = total + alive * value[min(anchor + len(rates[anchor]) + 1, num_anchors)]
    return value[0]


def expected_walk(rates: Tensor, lengths: Tensor) -> Expected:
    """Visit probabilities and expected accepted counts: the same programme run forwards. rates [B, N, K]."""
    batch, num_anchors, depths = rates.shape
    stop = _stop_probabilities(rates, lengths)
    visit = torch.zeros(batch, num_anchors + depths + 1, dtype=torch.float64, device=rates.device)
    visit[:, 0] = 1
    for anchor in range(num_anchors):
        visit[:, anchor + 1 : anchor + depths + 2] += visit[:, anchor, None] * stop[:, anchor]
    inside = torch.arange(num_anchors, device=rates.device) < lengths[:, None]
    visit = visit[:, :num_anchors] * inside
    alive = _inside_rates(rates, lengths).cumprod(-1)
    return Expected(visit, visit.sum(1), (visit[..., None] * alive).sum(1))


def _competing_positions(num_anchors: int, depths: int, device: torch.device) -> Tensor:
    """[N, K]: which token each draft competes with."""
    return torch.arange(num_anchors, device=device)[:, None] + torch.arange(depths, device=device)


def _inside_rates(rates: Tensor, lengths: Tensor) -> Tensor:
    """float64 rates, 0 where the competing token lies beyond the text's end."""
    positions = _competing_positions(rates.shape[1], rates.shape[2], rates.device)
    return rates.double() * (positions < lengths[:, None, None])


def _stop_probabilities(rates: Tensor, lengths: Tensor) -> Tensor:
    """P(L = l) for l = 0..K. [B, N, K] -> [B, N, K + 1]."""
    alive = _inside_rates(rates, lengths).cumprod(-1)
    at_least = torch.cat([torch.ones_like(alive[..., :1]), alive, torch.zeros_like(alive[..., :1])], dim=-1)
    return at_least[..., :-1] - at_least[..., 1:]

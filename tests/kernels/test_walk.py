"""The walk against its plain twin, against brute force, and replay against simulated speculative sampling."""

from __future__ import annotations

import itertools
import math
import random

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from draftloop.kernels import walk  # noqa: E402

K = 3
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=12), min_size=1, max_size=4)


def padded(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(text) for text in texts])
    width = max(1, int(lengths.max()))
    return torch.tensor([text + [0] * (width - len(text)) for text in texts]), lengths


def random_drafts(tokens: torch.Tensor, seed: int, k: int = K) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, (*tokens.shape, k), generator=generator)


@given(texts=TEXTS, seed=st.integers(0, 2**31))
def test_match_lengths_equal_the_plain_twin_and_are_zero_behind_the_end(texts: list[list[int]], seed: int) -> None:
    tokens, lengths = padded(texts)
    drafts = random_drafts(tokens, seed)
    matches = walk.match_lengths(drafts, tokens, lengths)
    for row, text in enumerate(texts):
        plain = walk.match_lengths_plain(drafts[row, : len(text)].tolist(), text)
        assert matches[row].tolist() == plain + [0] * (tokens.shape[1] - len(text))


@given(texts=TEXTS, seed=st.integers(0, 2**31))
def test_the_greedy_walk_equals_the_plain_twin(texts: list[list[int]], seed: int) -> None:
    tokens, lengths = padded(texts)
    matches = walk.match_lengths(random_drafts(tokens, seed), tokens, lengths)
    result = walk.greedy_walk(matches, lengths, k=K)
    for row, text in enumerate(texts):
        visited, at_least = walk.greedy_walk_plain(matches[row, : len(text)].tolist(), k=K)
        assert result.visited[row].nonzero().flatten().tolist() == visited
        assert int(result.num_steps[row]) == len(visited)
        assert result.at_least[row].tolist() == at_least


@given(texts=TEXTS, seed=st.integers(0, 2**31))
def test_tokens_are_steps_plus_accepted_minus_at_most_one_clipped_bonus(texts: list[list[int]], seed: int) -> None:
    tokens, lengths = padded(texts)
    result = walk.greedy_walk(walk.match_lengths(random_drafts(tokens, seed), tokens, lengths), lengths, k=K)
    clipped = result.num_steps + result.at_least.sum(1) - lengths
    assert ((clipped == 0) | (clipped == 1)).all()


def test_a_perfect_drafter_needs_one_step_per_k_plus_one_tokens() -> None:
    tokens = torch.arange(10)[None]
    positions = (torch.arange(10)[:, None] + torch.arange(K)).clamp(max=9)
    lengths = torch.tensor([10])
    result = walk.greedy_walk(walk.match_lengths(positions[None], tokens, lengths), lengths, k=K)
    assert result.visited[0].nonzero().flatten().tolist() == [0, 4, 8]
    assert result.at_least.tolist() == [[3, 3, 2]]  # the last step had two tokens left


def test_no_draft_never_matches() -> None:
    drafts = torch.full((1, 5, K), walk.NO_DRAFT)
    lengths = torch.tensor([5])
    assert walk.match_lengths(drafts, torch.zeros(1, 5, dtype=torch.long), lengths).tolist() == [[0] * 5]


def test_an_early_miss_hides_later_hits() -> None:
    drafts = torch.tensor([[[9, 6, 7], [6, 9, 8], [7, 8, 9], [8, 9, 9]]])
    matches = walk.match_lengths(drafts, torch.tensor([[5, 6, 7, 8]]), torch.tensor([4]))
    assert matches.tolist() == [[0, 1, 2, 1]]


RATES = st.lists(st.lists(st.floats(0, 1, allow_nan=False, width=32), min_size=2, max_size=2), min_size=1, max_size=5)


def brute_force_steps(rates: list[list[float]]) -> float:
    """Sum over every combination of accept/reject flags of all drafts, walked one by one."""
    flat = [rate for row in rates for rate in row]
    depths = len(rates[0])
    total = 0.0
    for flags in itertools.product((0, 1), repeat=len(flat)):
        weight = math.prod(rate if flag else 1 - rate for rate, flag in zip(flat, flags, strict=True))
        matches = []
        for anchor in range(len(rates)):
            row = flags[anchor * depths : (anchor + 1) * depths][: len(rates) - anchor]
            matches.append(next((depth for depth, flag in enumerate(row) if not flag), len(row)))
        total += weight * len(walk.greedy_walk_plain(matches, k=depths)[0])
    return total


@settings(max_examples=25, deadline=None)
@given(rates=RATES)
def test_expected_steps_equal_the_sum_over_all_outcomes(rates: list[list[float]]) -> None:
    tensor, lengths = torch.tensor([rates], dtype=torch.float64), torch.tensor([len(rates)])
    truth = brute_force_steps(rates)
    assert walk.expected_steps(tensor, lengths).item() == pytest.approx(truth, rel=1e-12)
    assert walk.expected_steps_plain(rates) == pytest.approx(truth, rel=1e-12)
    assert walk.expected_walk(tensor, lengths).num_steps.item() == pytest.approx(truth, rel=1e-12)


@given(texts=TEXTS, seed=st.integers(0, 2**31))
def test_rates_of_zero_and_one_give_the_greedy_walk(texts: list[list[int]], seed: int) -> None:
    tokens, lengths = padded(texts)
    drafts = random_drafts(tokens, seed)
    width = tokens.shape[1]
    positions = (torch.arange(width)[:, None] + torch.arange(K)).clamp(max=width - 1)
    rates = (drafts == tokens[:, positions]).double()
    greedy = walk.greedy_walk(walk.match_lengths(drafts, tokens, lengths), lengths, k=K)
    expected = walk.expected_walk(rates, lengths)
    assert torch.equal(walk.expected_steps(rates, lengths), greedy.num_steps.double())
    assert torch.equal(expected.visit, greedy.visited.double())
    assert torch.equal(expected.at_least, greedy.at_least.double())


def test_padding_does_not_change_expected_steps() -> None:
    generator = torch.Generator().manual_seed(3)
    rates = torch.rand(2, 9, K, generator=generator, dtype=torch.float64)
    short = walk.expected_steps(rates[1:, :4], torch.tensor([4]))
    both = walk.expected_steps(rates, torch.tensor([9, 4]))
    assert both[1].item() == pytest.approx(short.item(), rel=1e-12)


def test_a_draft_more_likely_than_the_target_is_always_accepted() -> None:
    q, p = torch.tensor([0.9, 0.2, 0.5]).log(), torch.tensor([0.3, 0.4, 0.5]).log()
    assert walk.acceptance_rates(q, p).tolist() == pytest.approx([1.0, 0.5, 1.0])


class Process:
    """A target and a drafter over a small vocabulary: a hidden state that comes in runs makes text easy or hard."""

    vocab = 6

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.target = [[self._normed(rng, 4.0) for _ in range(self.vocab)] for _ in range(2)]
        self.noise = [[self._normed(rng, 8.0) for _ in range(self.vocab)] for _ in range(2)]

    @staticmethod
    def _normed(rng: random.Random, sharpness: float) -> list[float]:
        weights = [math.exp(sharpness * rng.random()) for _ in range(Process.vocab)]
        return [weight / sum(weights) for weight in weights]

    def p(self, hard: int, last: int) -> list[float]:
        return self.target[hard][last]

    def q(self, hard: int, last: int, depth: int) -> list[float]:
        mix = (0.02, 0.9)[hard] + 0.01 * depth  # how far the drafter is off
        return [(1 - mix) * a + mix * b for a, b in zip(self.p(hard, last), self.noise[hard][last], strict=True)]


def speculate(process: Process, hard: list[int], k: int, rng: random.Random) -> tuple[list[int], int]:
    """Real speculative sampling of len(hard) tokens: (tokens, steps). The text's difficulty is fixed by position."""
    text, steps, last = [], 0, 0
    while len(text) < len(hard):
        steps += 1
        start = len(text)
        for depth in range(k + 1):
            if start + depth >= len(hard):
                break
            p = process.p(hard[start + depth], last)
            if depth == k:
                text.append(last := rng.choices(range(Process.vocab), p)[0])
                break
            q = process.q(hard[start + depth], last, depth)
            draft = rng.choices(range(Process.vocab), q)[0]
            if rng.random() < min(1.0, p[draft] / q[draft]):
                text.append(last := draft)
                continue
            residual = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
            text.append(last := rng.choices(range(Process.vocab), residual)[0])
            break
    return text, steps


def logged_rates(process: Process, hard: list[int], text: list[int], k: int) -> list[list[float]]:
    rates = []
    for anchor in range(len(text)):
        row = []
        for depth in range(k):
            at = min(anchor + depth, len(text) - 1)
            last = text[at - 1] if at else 0
            row.append(min(1.0, process.q(hard[at], last, depth)[text[at]] / process.p(hard[at], last)[text[at]]))
        rates.append(row)
    return rates


def test_replay_finds_the_tau_of_speculative_sampling_and_the_mean_over_positions_does_not() -> None:
    """The table of biases: text logged *without* speculation, replayed, against real speculative sampling."""
    rng, k = random.Random(5), 5
    process, num_texts, length = Process(1), 60, 100
    actual_steps, logged = [], []
    for _ in range(num_texts):
        hard, state = [], 0
        for _ in range(length):
            state = 1 - state if rng.random() < 0.06 else state
            hard.append(state)
        actual_steps.append(speculate(process, hard, k, rng)[1])
        plain_text = speculate(process, hard, 0, rng)[0]
        logged.append(logged_rates(process, hard, plain_text, k))
    rates, lengths = torch.tensor(logged), torch.full((num_texts,), length)
    replayed = walk.expected_steps(rates, lengths)
    actual = num_texts * length / sum(actual_steps)
    replay_tau = num_texts * length / float(replayed.sum())
    gaps = torch.tensor(actual_steps, dtype=torch.float64) - replayed
    error = float(gaps.std()) * num_texts**0.5 / float(replayed.sum())
    assert abs(replay_tau / actual - 1) < 3 * error
    assert error < 0.02
    inside = rates[:, : length - k]
    over_positions = 1 + float(inside.cumprod(-1).sum(-1).mean())
    of_marginals = 1 + float(inside.mean((0, 1)).cumprod(-1).sum())
    assert over_positions > 1.1 * actual
    assert over_positions > of_marginals


def test_greedy_drafts_match_sampled_text_as_often_as_serving_accepts_them() -> None:
    """One-hot drafts at temperature 1: acceptance given the emitted token is equality with it."""
    rng, process = random.Random(9), Process(2)
    accepted = matched = 0
    trials = 20000
    p = process.p(0, 0)
    draft = max(range(Process.vocab), key=p.__getitem__)
    for _ in range(trials):
        accepted += rng.random() < p[draft]
        matched += rng.choices(range(Process.vocab), p)[0] == draft
    assert matched / trials == pytest.approx(p[draft], abs=0.015)
    assert accepted / trials == pytest.approx(p[draft], abs=0.015)

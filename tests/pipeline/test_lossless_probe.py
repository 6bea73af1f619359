"""The losslessness probe on engines whose truth is known: lossless ones pass at the rate stated, noise does not."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from draftloop.pipeline import lossless_probe as probe
from draftloop.pipeline.errors import EngineError, InputError
from draftloop.pipeline.losslessness import Divergence
from draftloop.pipeline.records import SpecCounters
from draftloop.pipeline.rollout.engine_client import Generated, Scores

PROMPTS = [(number,) for number in range(12)]
WORDS = 8


def distribution(temperature: float) -> list[float]:
    """Zipf over a few words, sharpened by the temperature."""
    weights = [math.exp(-math.log(rank + 1) * 1.5 / temperature) for rank in range(WORDS)]
    return [weight / sum(weights) for weight in weights]


@dataclass
class WordEngine:
    """Draws words from one distribution; with speculation from another, where it is told to."""

    noise: float = 0.0  # share of speculated tokens that are uniform noise
    sharpen: float = 1.0  # speculation divides the temperature by it
    greedy_error: int | None = None  # this prompt's second token is wrong with speculation
    greedy_margin: float = 3.0
    silent: bool = False
    short_scores: bool = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        speculate: bool = True,
    ) -> Generated:
        outputs = []
        for number, _ in enumerate(prompts):
            if self.silent:
                outputs.append(())
            elif not temperature:
                wrong = speculate and number == self.greedy_error
                outputs.append((0, 1 if wrong else 0, *(0,) * (max_tokens - 2)))
            else:
                drawn = random.Random(f"{seed} {number} {speculate}")
                weights = distribution(temperature / (self.sharpen if speculate else 1))
                noise = self.noise if speculate else 0
                outputs.append(
                    tuple(
                        drawn.randrange(WORDS) if drawn.random() < noise else drawn.choices(range(WORDS), weights)[0]
                        for _ in range(max_tokens)
                    )
                )
        margins = tuple((self.greedy_margin,) * len(output) for output in outputs)
        return Generated(tuple(outputs), margins, SpecCounters())

    def score(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Scores:
        logs = [math.log(share) for share in distribution(1.0)]
        if self.short_scores:
            outputs = [output[1:] for output in outputs]
        return Scores(
            tuple(tuple(logs[token] for token in output) for output in outputs),
            tuple(tuple(token + 1 for token in output) for output in outputs),
            tuple(tuple(logs[0] - logs[token] for token in output) for output in outputs),
        )


def sampled(engine: WordEngine, seed: int, num_tokens: int = 16) -> probe.Sampled:
    plain = probe.plain_side(engine, PROMPTS, max_tokens=num_tokens, seed=2 * seed)
    return probe.check_sampling(engine, PROMPTS, plain, max_tokens=num_tokens, seed=2 * seed + 1)


def test_equal_greedy_outputs_are_identical_and_every_token_the_best() -> None:
    found = probe.check_greedy(WordEngine(), PROMPTS, max_tokens=4, tie_margin=0.5, fp32=True)
    assert found == probe.Greedy((), (), 48)
    assert found.identical
    assert found.lossless


def test_a_wrong_greedy_token_is_named_with_its_rank_and_margin() -> None:
    found = probe.check_greedy(WordEngine(greedy_error=5), PROMPTS, max_tokens=4, tie_margin=0.5, fp32=False)
    assert found.divergences == (Divergence(5, 1, 3.0, False),)
    assert [(each.prompt, each.position, each.rank, each.tie) for each in found.not_best] == [(5, 1, 2, False)]
    assert found.not_best[0].margin == pytest.approx(1.5 * math.log(2))
    assert not found.lossless


def test_a_near_tie_is_let_pass_in_bf16_and_not_in_fp32() -> None:
    engine = WordEngine(greedy_error=5, greedy_margin=0.2)
    assert probe.check_greedy(engine, PROMPTS, max_tokens=4, tie_margin=1.1, fp32=False).lossless
    strict = probe.check_greedy(engine, PROMPTS, max_tokens=4, tie_margin=1.1, fp32=True)
    assert not strict.lossless
    assert strict.not_best[0].tie


def test_noise_is_flagged_and_told_in_nats() -> None:
    found = sampled(WordEngine(noise=1.0), 1)
    assert not found.lossless
    assert found.difference < -0.5
    assert (found.num_pairs, found.num_tokens) == (12, 192)
    assert found.p_value == 2 / 2**12


def test_outputs_that_are_too_likely_are_flagged_too() -> None:
    assert not sampled(WordEngine(sharpen=50.0), 1).lossless


def test_half_noise_is_flagged_nearly_always() -> None:
    assert sum(not sampled(WordEngine(noise=0.6), seed).lossless for seed in range(100)) >= 95


def test_a_lossless_engine_is_flagged_in_no_more_than_one_of_a_thousand() -> None:
    flagged = sum(not sampled(WordEngine(), seed, num_tokens=8).lossless for seed in range(3000))
    assert flagged <= 9  # expected: fewer than 3; more than 9 has a chance below 0.002


def test_the_test_alone_keeps_its_rate_without_the_floor() -> None:
    drawn = random.Random(4)
    flagged = sum(probe.sign_flip_p([drawn.gauss(0, 1 + number) for number in range(11)]) <= 0.05 for _ in range(1000))
    assert 25 <= flagged <= 75


def test_a_sure_but_invisible_difference_is_not_flagged() -> None:
    plain = probe.Plain((-1.0,) * 12, (8,) * 12)
    assert probe.compare_sides(probe.Plain((-1.2,) * 12, (8,) * 12), plain).lossless
    assert not probe.compare_sides(probe.Plain((-1.3,) * 12, (8,) * 12), plain).lossless


def test_the_exact_test_counts_every_flip() -> None:
    assert probe.sign_flip_p([1.0, 1.0, 1.0]) == 2 / 8
    assert probe.sign_flip_p([1.0, -1.0]) == 1.0
    assert probe.sign_flip_p([1.0] * 17) == pytest.approx(1 / 20_001, abs=2e-4)


def test_too_few_answers_are_no_verdict() -> None:
    with pytest.raises(InputError, match="0 pairs of sampled texts, 11 are needed"):
        sampled(WordEngine(silent=True), 1)
    with pytest.raises(InputError, match="1 texts against 2"):
        probe.compare_sides(probe.Plain((1.0,), (1,)), probe.Plain((1.0, 1.0), (1, 1)))


def test_scores_of_another_length_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match="another number of tokens"):
        sampled(WordEngine(short_scores=True), 1)


def test_prompts_take_turns_until_there_are_enough_pairs() -> None:
    assert probe.repeated([(1,), (2,)], 3) == [(1,), (2,)] * 5 + [(1,)]
    assert len(probe.repeated([(1,)], 20)) == 20

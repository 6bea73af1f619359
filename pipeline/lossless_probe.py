"""Does speculation change what a running engine says? Asked of the engine itself, with its own target as the judge.

Greedy: outputs with speculation against token-by-token requests, which no drafter has a part in; and each token's rank
under the target alone. Sampling: per pair of texts (same prompt, with and without speculation) the difference of the
mean target log-probability a token. If speculation is lossless both texts of a pair are drawn from one distribution, so
each difference is as likely as its opposite: the sign-flip test over all 2^n flips is exact (Fisher's randomisation
test for pairs), whatever the texts are like. A floor on the effect keeps many pairs from flagging what nobody sees.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from draftloop.pipeline.errors import EngineError, InputError
from draftloop.pipeline.losslessness import Divergence, compare_greedy
from draftloop.pipeline.records import ProbeResult
from draftloop.pipeline.rollout.engine_client import Generated, ProbingEngine

ALPHA = 0.001  # chance that a lossless engine is flagged by one test
FLOOR = 0.25  # nats a token: a smaller difference is not flagged, however sure
MIN_PAIRS = 11  # with fewer no difference is improbable enough: 2 / 2^10 > ALPHA
TEMPERATURE = 0.8
_EXACT_PAIRS = 16  # up to here every flip is counted
_NUM_FLIPS = 20_000  # drawn beyond

Ids = Sequence[int]


class NotBest(msgspec.Struct, frozen=True):
    """An output token that is not the target's best there."""

    prompt: int  # index
    position: int  # output token
    rank: int  # 2: second best
    margin: float  # log-probability of the best minus this token's
    tie: bool  # margin <= the margin allowed


class Greedy(msgspec.Struct, frozen=True):
    """Greedy outputs with speculation against without."""

    divergences: tuple[Divergence, ...]  # first differences, a prompt at most one
    not_best: tuple[NotBest, ...]
    num_tokens: int  # with speculation

    @property
    def identical(self) -> bool:
        return not self.divergences

    @property
    def lossless(self) -> bool:
        """Identical, or different at near ties of the target only."""
        return all(each.tie for each in self.divergences) and all(each.tie for each in self.not_best)


class Sampled(msgspec.Struct, frozen=True):
    """Sampled outputs with speculation against without; log-probabilities in nats a token, means over texts."""

    with_speculation: float
    without: float
    p_value: float
    num_pairs: int
    num_tokens: int  # of the side with fewer

    @property
    def difference(self) -> float:
        return self.with_speculation - self.without

    @property
    def lossless(self) -> bool:
        return self.p_value > ALPHA or abs(self.difference) < FLOOR


class Plain(msgspec.Struct, frozen=True):
    """The side without speculation. A drafter has no part in it: good for as long as the engine runs."""

    means: tuple[float, ...]  # per text: mean target log-probability a token; 0.0 for an empty text
    lengths: tuple[int, ...]


def check_greedy(
    engine: ProbingEngine, prompts: Sequence[Ids], *, max_tokens: int, tie_margin: float, fp32: bool
) -> Greedy:
    """Compare greedy outputs with and without speculation, and each token with the target's best.

    tie_margin: nats up to which two tokens count as tied; fp32 allows none between the two outputs.
    """
    spoken = engine.generate(prompts, max_tokens=max_tokens)
    alone = engine.generate(prompts, max_tokens=max_tokens, speculate=False)
    found = compare_greedy(_as_probe(spoken), _as_probe(alone), 0.0 if fp32 else tie_margin)
    return Greedy(
        found.divergences,
        not_best(engine, prompts, spoken.output_ids, tie_margin),
        sum(map(len, spoken.output_ids)),
    )


def not_best(
    engine: ProbingEngine, prompts: Sequence[Ids], outputs: Sequence[Ids], tie_margin: float
) -> tuple[NotBest, ...]:
    """Output tokens that the target by itself ranks below its best."""
    scores = engine.score(prompts, outputs)
    return tuple(
        NotBest(prompt, position, rank, margin, margin <= tie_margin)
        for prompt, (ranks, margins) in enumerate(zip(scores.ranks, scores.margins, strict=True))
        for position, (rank, margin) in enumerate(zip(ranks, margins, strict=True))
        if rank > 1
    )


def plain_side(engine: ProbingEngine, prompts: Sequence[Ids], *, max_tokens: int, seed: int | None = None) -> Plain:
    """Sample each prompt without speculation."""
    return _side(engine, prompts, max_tokens=max_tokens, seed=seed, speculate=False)


def check_sampling(
    engine: ProbingEngine, prompts: Sequence[Ids], plain: Plain, *, max_tokens: int, seed: int | None = None
) -> Sampled:
    """Sample the same prompts with speculation, and compare. A seed: another one than the plain side's.

    Raises InputError where fewer than MIN_PAIRS pairs have text.
    """
    spoken = _side(engine, prompts, max_tokens=max_tokens, seed=seed, speculate=True)
    return compare_sides(spoken, plain)


def compare_sides(spoken: Plain, plain: Plain) -> Sampled:
    """The test itself. Raises InputError for too few pairs or sides of different prompts."""
    if len(spoken.means) != len(plain.means):
        raise InputError(f"{len(spoken.means)} texts against {len(plain.means)}", mend="sample the same prompts twice")
    pairs = [
        (left, right)
        for left, right, *lengths in zip(spoken.means, plain.means, spoken.lengths, plain.lengths, strict=True)
        if min(lengths) > 0
    ]
    if len(pairs) < MIN_PAIRS:
        raise InputError(
            f"{len(pairs)} pairs of sampled texts, {MIN_PAIRS} are needed", mend="give prompts that are answered"
        )
    return Sampled(
        sum(left for left, _ in pairs) / len(pairs),
        sum(right for _, right in pairs) / len(pairs),
        sign_flip_p([left - right for left, right in pairs]),
        len(pairs),
        min(sum(spoken.lengths), sum(plain.lengths)),
    )


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the sign-flip test on the mean: exact up to 16 pairs, 20,000 drawn flips beyond."""
    observed = abs(sum(differences)) * (1 - 1e-12)
    if len(differences) <= _EXACT_PAIRS:
        sums = [0.0]
        for value in differences:
            sums = [each + sign for each in sums for sign in (value, -value)]
        return sum(abs(each) >= observed for each in sums) / len(sums)
    drawn = random.Random(0)
    hits = sum(
        abs(sum(value if bits >> place & 1 else -value for place, value in enumerate(differences))) >= observed
        for bits in (drawn.getrandbits(len(differences)) for _ in range(_NUM_FLIPS))
    )
    return (hits + 1) / (_NUM_FLIPS + 1)


def repeated(prompts: Sequence[Ids], num_pairs: int) -> list[Ids]:
    """Each prompt as often as `num_pairs` texts need, taking turns."""
    return [prompts[index % len(prompts)] for index in range(max(num_pairs, MIN_PAIRS))]


def _side(
    engine: ProbingEngine, prompts: Sequence[Ids], *, max_tokens: int, seed: int | None, speculate: bool
) -> Plain:
    made = engine.generate(prompts, max_tokens=max_tokens, temperature=TEMPERATURE, seed=seed, speculate=speculate)
    filled = [(prompt, output) for prompt, output in zip(prompts, made.output_ids, strict=True) if output]
    if not filled:
        return Plain((0.0,) * len(prompts), (0,) * len(prompts))
    scores = engine.score([prompt for prompt, _ in filled], [output for _, output in filled])
    if [len(output) for _, output in filled] != [len(logprobs) for logprobs in scores.logprobs]:
        raise EngineError("the engine scored another number of tokens than it was given")
    scored = iter(scores.logprobs)
    means = tuple(sum(one := next(scored)) / len(one) if output else 0.0 for output in made.output_ids)
    return Plain(means, tuple(map(len, made.output_ids)))


def _as_probe(made: Generated) -> ProbeResult:
    return ProbeResult(made.output_ids, made.margins, made.counters)


def told_greedy(found: Greedy) -> str:
    """One line for a person."""
    if found.identical and not found.not_best:
        return f"greedy: {found.num_tokens} tokens, identical with and without speculation"
    places = [f"prompt {each.prompt} token {each.position} margin {each.margin:.3f}" for each in found.divergences]
    ranks = [
        f"prompt {each.prompt} token {each.position} rank {each.rank} by {each.margin:.3f}" for each in found.not_best
    ]
    parts = [
        *([f"first differences at {', '.join(places)}"] if places else []),
        *([f"not the target's best: {', '.join(ranks[:8])}"] if ranks else []),
    ]
    return f"greedy: {found.num_tokens} tokens, {'near ties only' if found.lossless else 'NOT lossless'}; " + "; ".join(
        parts
    )


def told_sampling(found: Sampled) -> str:
    """One line for a person."""
    return (
        f"sampling at temperature {TEMPERATURE}: {found.with_speculation:.2f} nats a token with speculation, "
        f"{found.without:.2f} without ({found.num_pairs} pairs, {found.num_tokens} tokens a side, "
        f"p = {found.p_value:.2g}): {'no difference shown' if found.lossless else 'NOT lossless'}"
    )

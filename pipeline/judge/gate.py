"""The gate: pure decision from two replay reports. Loss is not evidence; only the interval decides.

A challenger passes if all of these hold:
  size     enough conversations and tokens were replayed
  overall  the lower bound of tau_challenger / tau_champion is above 1 + margin
  slices   no slice is shown to lose more than the tolerance (upper bound below 1 - tolerance, Holm over slices)
  speed    where a measurement is given: at no batch size is the drafter shown to be slower than none
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from draftloop.pipeline.judge.config import GateConfig
from draftloop.pipeline.judge.report import ReplayReport, RequestReplay, by_slice, tau_of
from draftloop.pipeline.judge.speed import SpeedReport
from draftloop.pipeline.judge.statistics import Comparison, Paired, bootstrap, loss_p_value, pair

__all__ = ["GateConfig", "Reason", "SliceResult", "Verdict", "decide"]

Check = Literal["size", "overall", "slice", "speed"]


class Reason(msgspec.Struct, frozen=True):
    """One check of the gate and its outcome, as a sentence with numbers."""

    check: Check
    passed: bool
    text: str


class SliceResult(msgspec.Struct, frozen=True, kw_only=True):
    """One slice's comparison; its interval is at the Holm level it was judged at."""

    value: str
    comparison: Comparison
    challenger_tau: float
    champion_tau: float
    judged: bool  # False: too few conversations
    lost: bool


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The gate's decision with all of its evidence."""

    passed: bool
    reasons: tuple[str, ...]  # what refused it; what carried it where it passed
    checks: tuple[Reason, ...]  # every check, in order
    comparison: Comparison
    slices: tuple[SliceResult, ...]
    challenger: str
    champion: str  # "none" or "ngram" on day 0
    challenger_tau: float
    champion_tau: float
    challenger_digest: str | None  # of the drafter folders replayed; None: no drafter, or the n-gram floor
    champion_digest: str | None
    target: str  # Fingerprint.digest
    snapshot_id: str
    k: int
    config: dict[str, float | int | str]


def decide(
    challenger: ReplayReport,
    champion: ReplayReport,
    config: GateConfig,
    seed: int,
    *,
    speed: SpeedReport | None = None,
) -> Verdict:
    """Judge a challenger. On day 0 the champion is the replay of the floor (none or n-gram).

    speed: measured with and without the challenger; None leaves that check out. Pure: equal arguments, equal verdict.
    Raises InputError unless both replayed the same text.
    """
    paired = pair(challenger, champion)
    comparison = bootstrap(
        paired,
        seed=seed,
        num_resamples=config.num_resamples,
        confidence=config.confidence,
        min_conversations=config.min_conversations,
    )
    slices = _judge_slices(challenger, champion, config, seed)
    checks = (
        *_size_checks(comparison, config),
        _overall_check(comparison, challenger, champion, config),
        *_slice_checks(slices, config),
        *_speed_checks(speed, config),
    )
    passed = all(check.passed for check in checks)
    return Verdict(
        passed=passed,
        reasons=tuple(check.text for check in checks if check.passed == passed),
        checks=checks,
        comparison=comparison,
        slices=slices,
        challenger=challenger.drafter,
        champion=champion.drafter,
        challenger_tau=challenger.tau,
        champion_tau=champion.tau,
        challenger_digest=challenger.drafter_digest,
        champion_digest=champion.drafter_digest,
        target=challenger.target,
        snapshot_id=challenger.snapshot_id,
        k=challenger.k,
        config=config.model_dump(),
    )


def _size_checks(comparison: Comparison, config: GateConfig) -> list[Reason]:
    counts = (
        ("conversations", comparison.num_conversations, config.min_conversations),
        ("tokens", comparison.num_tokens, config.min_tokens),
    )
    return [
        Reason("size", True, f"{have} {what} replayed, {need} needed")
        if have >= need
        else Reason("size", False, f"too few {what}: {have} replayed, {need} needed")
        for what, have, need in counts
    ]


def _overall_check(
    comparison: Comparison, challenger: ReplayReport, champion: ReplayReport, config: GateConfig
) -> Reason:
    bar = 1 + config.margin
    passed = comparison.low > bar
    text = (
        f"tau {challenger.tau:.3f} against {champion.tau:.3f} of {champion.drafter}: {_interval(comparison)}, "
        f"lower bound {'above' if passed else 'not above'} {bar:.3f}"
    )
    if not passed:
        text += f" (a gain under {comparison.minimum_detectable:.1%} could not have been seen)"
    return Reason("overall", passed, text)


def _judge_slices(
    challenger: ReplayReport, champion: ReplayReport, config: GateConfig, seed: int
) -> tuple[SliceResult, ...]:
    """Holm: the likeliest loss is tested at alpha / m, the next at alpha / (m - 1), until one is not shown."""
    key, threshold = config.slice_key, 1 - config.slice_tolerance
    ours, theirs = by_slice(challenger.requests, key), by_slice(champion.requests, key)
    pairs = {value: _pair_slice(challenger, champion, requests) for value, requests in ours.items()}
    sized = [value for value in pairs if len(pairs[value].challenger) >= config.slice_min_conversations]
    p_values = {value: loss_p_value(pairs[value], threshold) for value in sized}
    family = sorted(sized, key=lambda value: (p_values[value], value))
    results: dict[str, tuple[Comparison, bool]] = {}
    still_losing = True
    for index, value in enumerate(family):
        level = (1 - config.confidence) / (len(family) - index)
        comparison = _slice_bootstrap(pairs[value], config, seed, 1 - level)
        still_losing = still_losing and comparison.high < threshold
        results[value] = (comparison, still_losing)
    for value in pairs.keys() - results.keys():
        results[value] = (_slice_bootstrap(pairs[value], config, seed, config.confidence), False)
    return tuple(
        SliceResult(
            value=value,
            comparison=results[value][0],
            challenger_tau=tau_of(ours[value]),
            champion_tau=tau_of(theirs[value]),
            judged=value in p_values,
            lost=results[value][1],
        )
        for value in pairs
    )


def _pair_slice(challenger: ReplayReport, champion: ReplayReport, requests: Sequence[RequestReplay]) -> Paired:
    kept = {request.record_id for request in requests}
    return pair(challenger, champion, keep=lambda request: request.record_id in kept)


def _slice_bootstrap(paired: Paired, config: GateConfig, seed: int, confidence: float) -> Comparison:
    return bootstrap(
        paired,
        seed=seed,
        num_resamples=config.num_resamples,
        confidence=confidence,
        min_conversations=config.slice_min_conversations,
    )


def _slice_checks(slices: Sequence[SliceResult], config: GateConfig) -> list[Reason]:
    floor = 1 - config.slice_tolerance
    checks = []
    for result in slices:
        name = f"slice {config.slice_key}={result.value}"
        count = f"{result.comparison.num_conversations} conversations"
        if not result.judged:
            text = f"{name}: {count}, too few to judge (need {config.slice_min_conversations})"
        elif result.lost:
            text = f"{name} loses: {_interval(result.comparison)} over {count}, upper bound below {floor:.3f}"
        else:
            text = (
                f"{name}: {_interval(result.comparison)} over {count}, no loss over {config.slice_tolerance:.1%} shown"
            )
        checks.append(Reason("slice", not result.lost, text))
    return checks


def _speed_checks(speed: SpeedReport | None, config: GateConfig) -> list[Reason]:
    checks = []
    for result in speed.results if speed is not None else ():
        passed = result.high >= config.min_speedup
        text = (
            f"batch {result.batch}: {result.with_tokens_per_s:.1f} tokens/s against {result.without_tokens_per_s:.1f} "
            f"without a drafter, ratio {result.ratio:.3f} ({result.low:.3f} to {result.high:.3f})"
        )
        if not passed:
            text += f", upper bound below {config.min_speedup:.3f}"
        checks.append(Reason("speed", passed, text))
    return checks


def _interval(comparison: Comparison) -> str:
    return f"ratio {comparison.ratio:.3f} ({comparison.low:.3f} to {comparison.high:.3f})"

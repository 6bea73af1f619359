"""Does production agree with the verdict? A sequential test on live tau that may be looked at after every step.

Tokens per step x lie in [1, K + 1]; y = (x - 1) / K lies in [0, 1] with mean m, so it is sub-Bernoulli (the exponential
is convex). For every q, (q / m)^S ((1 - q) / (1 - m))^(n - S) with S = sum of y is then a supermartingale, and so is
its mixture over q ~ Beta(1/2, 1/2):

    M_n(m) = B(S + 1/2, n - S + 1/2) / B(1/2, 1/2) / (m^S (1 - m)^(n - S))

By Ville's inequality the set {m : M_n(m) < 1 / alpha} holds the true mean at *all* n together with probability
1 - alpha: the beta-binomial mixture of Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric,
nonasymptotic confidence sequences", Annals of Statistics 49 (2021). It needs sums only, which is what engines count.

Steps of one request resemble each other: `design_effect` steps count as one observation (Kish 1965).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from draftloop.pipeline.records import SpecCounters

Decision = Literal["CONTINUE", "PASS", "ROLL_BACK"]

_DRAFTING = 0.75  # of K a step: less is left over only where many outputs are shorter than a few steps


class CanaryConfig(BaseModel):
    """How long a new drafter is watched and what takes it back."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    alpha: float = Field(
        default=0.01, gt=0, lt=0.5
    )  # chance of taking back a drafter that keeps its promise, over all looks
    tolerance: float = Field(
        default=0.1, ge=0, lt=1
    )  # live traffic is not the held-out set: this much below is no breach
    # y's variance is about half of the bound m (1 - m) that the test allows for, so 4 covers a real design effect of 6
    # to 8: requests of 50 steps with an intraclass correlation of 0.1 to 0.14.
    design_effect: float = Field(default=4.0, ge=1)
    settle_steps: int = Field(
        default=64, ge=0
    )  # the first steps after a swap draft from the old drafter's cache: not counted
    trip_steps: int = Field(default=100, ge=1)  # from here on, hardly a token accepted means broken
    trip_tau: float = Field(default=1.02, ge=1)
    level_steps: int = Field(default=500, ge=1)  # a previous drafter seen for fewer steps has no known level
    watch_steps: int = Field(default=20_000, ge=1)  # after so many steps without evidence of harm the drafter stays


class Expectation(NamedTuple):
    """What the signed verdict promised: tau on held-out requests, with its interval."""

    tau: float
    low: float
    high: float


class Interval(NamedTuple):
    """Bounds of tau that hold at all looks together."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the canary and what it means."""

    decision: Decision
    reason: str  # a sentence with its numbers
    tau: float
    num_steps: int
    interval: Interval


def interval(seen: SpecCounters, k: int, *, alpha: float, design_effect: float) -> Interval:
    """Confidence sequence of tau after `seen`; (1, k + 1) without a step."""
    if seen.num_steps <= 0:
        return Interval(1.0, k + 1.0)
    n = seen.num_steps / design_effect
    hits = min(n, max(0.0, (seen.num_emitted - seen.num_steps) / k / design_effect))
    limit = math.log(1 / alpha)
    mixed = _log_beta(hits + 0.5, n - hits + 0.5) - _log_beta(0.5, 0.5)

    def excluded(mean: float) -> bool:
        return mixed - hits * math.log(mean) - (n - hits) * math.log1p(-mean) >= limit

    middle = hits / n
    return Interval(1 + k * _edge(excluded, 0.0, middle), 1 + k * _edge(excluded, 1.0, middle))


def _edge(excluded: Callable[[float], bool], outer: float, inner: float) -> float:
    """Where the excluded means end between a bound of the range and the observed mean; errs outwards."""
    for _ in range(30):
        half = (outer + inner) / 2
        if half in (0.0, 1.0, outer, inner):
            break
        outer, inner = (half, inner) if excluded(half) else (outer, half)
    return outer


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def judge(
    seen: SpecCounters,
    k: int,
    config: CanaryConfig,
    *,
    expected: Expectation | None,
    previous: SpecCounters | None,
) -> Look:
    """Decide on the steps since the swap. Pure; may be called after every step.

    ROLL_BACK: hardly anything is accepted; or tau is shown to be below what was promised and, where the previous
    drafter's level in production is known, below that as well (a harder day lowers both drafters and is no breach; an
    easier yesterday is no promise). PASS: shown not to be below that floor, or watched long enough.
    previous: counters of the previous drafter's last traffic; None, too few steps or nothing drafted: not known.
    """
    bounds = interval(seen, k, alpha=config.alpha / 2, design_effect=config.design_effect)

    def look(decision: Decision, reason: str) -> Look:
        return Look(decision, reason, seen.tau, seen.num_steps, bounds)

    if seen.num_steps >= config.trip_steps and seen.tau <= config.trip_tau:
        return look("ROLL_BACK", f"tau {seen.tau:.3f} over {seen.num_steps} steps: next to no proposal is accepted")
    floors = {}
    if expected is not None:
        floors[f"the promised {expected.tau:.2f} (low {expected.low:.2f})"] = expected.low * (1 - config.tolerance)
    if previous is not None and previous.num_steps >= config.level_steps and previous.num_drafted > 0:
        level = interval(previous, k, alpha=config.alpha / 2, design_effect=config.design_effect)
        floors[f"the previous drafter's {previous.tau:.2f}"] = level.low
    live = f"live tau {seen.tau:.2f} in [{bounds.low:.2f}, {bounds.high:.2f}] over {seen.num_steps} steps"
    if floors and all(bounds.high < floor for floor in floors.values()):
        return look("ROLL_BACK", f"{live} is below {' and '.join(floors)}")
    if floors and bounds.low > min(floors.values()):
        return look("PASS", f"{live} is not below {' or '.join(floors)}")
    if seen.num_steps >= config.watch_steps:
        return look("PASS", f"{live}: no evidence of harm in {config.watch_steps} steps")
    return look("CONTINUE", live)


def expectation_of(document: Mapping[str, Any]) -> Expectation | None:
    """What a signed verdict promises; None for an override: its evidence is why the gate refused, not a promise."""
    evidence = document.get("evidence")
    if not isinstance(evidence, Mapping) or document.get("decision") == "override" or "challenger_tau" not in evidence:
        return None
    found = evidence["comparison"]
    tau = float(evidence["challenger_tau"])
    return Expectation(tau, tau * found["low"] / found["ratio"], tau * found["high"] / found["ratio"])


def depth_of(document: Mapping[str, Any], seen: SpecCounters) -> int:
    """K: what the verdict was replayed with, or more where the engine drafts more."""
    evidence = document.get("evidence")
    judged = int(evidence.get("k", 1)) if isinstance(evidence, Mapping) else 1
    return max(judged, math.ceil(seen.num_drafted / seen.num_steps) if seen.num_steps else 1)


def recent(readings: tuple[SpecCounters, ...], num_steps: int) -> tuple[SpecCounters, ...]:
    """Readings that reach back over `num_steps` and hardly further; only the newest where the engine restarted."""
    newest = readings[-1]
    if any(reading.num_steps > newest.num_steps for reading in readings):
        return (newest,)
    distinct = tuple(dict.fromkeys(readings))
    while len(distinct) > 2 and newest.num_steps - distinct[1].num_steps >= num_steps:
        distinct = distinct[1:]
    return distinct if len(distinct) <= 64 else (distinct[0], *distinct[1:-1:2], newest)


def level(readings: Sequence[SpecCounters], depth: int) -> SpecCounters:
    """Traffic between successive readings, as far as the drafter really served it.

    Where clearly fewer than K tokens a step were drafted, steps without the drafter are among them (somebody measured
    the engine without it): such a stretch says nothing about the drafter and is left out. So is an engine's restart.
    """
    total = SpecCounters()
    for earlier, later in pairwise(readings):
        seen = later.since(earlier)
        if seen.num_steps > 0 and seen.num_drafted >= _DRAFTING * depth * seen.num_steps:
            total = SpecCounters(
                total.num_steps + seen.num_steps,
                total.num_emitted + seen.num_emitted,
                total.num_drafted + seen.num_drafted,
                total.num_accepted + seen.num_accepted,
            )
    return total

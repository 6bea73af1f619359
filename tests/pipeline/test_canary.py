"""The canary's promises: it rarely cries wolf however often it is asked, and it is quick when the wolf is there."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.pipeline.records import SpecCounters
from draftloop.pipeline.rollout.canary import (
    CanaryConfig,
    Expectation,
    depth_of,
    expectation_of,
    interval,
    judge,
    level,
    recent,
)

K = 4
IID = CanaryConfig(design_effect=1.0, alpha=0.05, tolerance=0.0, watch_steps=10**9)


def counters(num_steps: int, tau: float) -> SpecCounters:
    emitted = round(num_steps * tau)
    return SpecCounters(num_steps, emitted, num_steps * K, emitted - num_steps)


def emitted_in_a_step(chance: random.Random, accept: float) -> int:
    """One bonus token and proposals accepted one after another, each with probability `accept`."""
    number = 1
    while number <= K and chance.random() < accept:
        number += 1
    return number


def mean_of(accept: float) -> float:
    return sum(accept**depth for depth in range(K + 1))


def first_decision(
    chance: random.Random, accepts: list[float], config: CanaryConfig, expected: Expectation, *, num_steps: int
) -> tuple[str, int]:
    """Ask after every step of requests with these acceptance rates in turn, 25 steps each."""
    seen = SpecCounters()
    for step in range(num_steps):
        emitted = emitted_in_a_step(chance, accepts[step // 25 % len(accepts)])
        seen = SpecCounters(
            seen.num_steps + 1,
            seen.num_emitted + emitted,
            seen.num_drafted + K,
            seen.num_accepted + emitted - 1,
        )
        if seen.tau >= expected.low and seen.tau > config.trip_tau:
            continue  # cannot be an alarm: not asked, for speed
        look = judge(seen, K, config, expected=expected, previous=None)
        if look.decision == "ROLL_BACK":
            return look.decision, step + 1
    return "CONTINUE", num_steps


def test_false_alarms_stay_under_alpha_although_it_looks_at_every_step() -> None:
    tau = mean_of(0.55)
    expected = Expectation(tau, tau, tau)  # exactly what it delivers: the worst case of the null
    chance = random.Random(1)
    alarms = sum(first_decision(chance, [0.55], IID, expected, num_steps=500)[0] == "ROLL_BACK" for _ in range(120))
    assert alarms <= 120 * 0.05


def test_false_alarms_stay_under_alpha_when_requests_differ() -> None:
    chance = random.Random(2)
    tau = (mean_of(0.35) + mean_of(0.7)) / 2
    config = CanaryConfig(alpha=0.05, tolerance=0.0, watch_steps=10**9)
    alarms = 0
    for _ in range(120):
        accepts = [chance.choice((0.35, 0.7)) for _ in range(24)]
        alarms += first_decision(chance, accepts, config, Expectation(tau, tau, tau), num_steps=600)[0] == "ROLL_BACK"
    assert alarms <= 120 * 0.05


def test_a_collapse_from_2_to_1_1_is_found_within_400_steps() -> None:
    chance = random.Random(3)
    delays = []
    for _ in range(40):
        decision, steps = first_decision(chance, [0.0917], CanaryConfig(), Expectation(2.0, 1.9, 2.1), num_steps=2000)
        assert decision == "ROLL_BACK"
        delays.append(steps)
    assert sorted(delays)[20] <= 350
    assert max(delays) <= 500


def test_nothing_accepted_trips_after_trip_steps_whatever_was_promised() -> None:
    config = CanaryConfig(trip_steps=100)
    assert judge(counters(99, 1.0), K, config, expected=None, previous=None).decision == "CONTINUE"
    assert judge(counters(100, 1.0), K, config, expected=None, previous=None).decision == "ROLL_BACK"


@pytest.mark.parametrize(
    ("live", "promised", "previous", "decision"),
    [
        (2.0, 2.0, 1.8, "PASS"),
        (1.6, 2.2, 1.3, "PASS"),  # a harder day than the held-out set, still better than what was there
        (1.9, 2.0, 2.6, "PASS"),  # the promise is kept, yesterday was easier
        (1.2, 2.0, 1.8, "ROLL_BACK"),
        (1.2, 2.0, None, "ROLL_BACK"),
        (1.2, None, 1.8, "ROLL_BACK"),
    ],
)
def test_a_drafter_goes_only_if_it_is_below_its_promise_and_below_the_previous_one(
    live: float, promised: float | None, previous: float | None, decision: str
) -> None:
    expected = None if promised is None else Expectation(promised, promised * 0.97, promised * 1.03)
    level = None if previous is None else counters(5000, previous)
    look = judge(counters(15_000, live), K, CanaryConfig(), expected=expected, previous=level)
    assert look.decision == decision


def test_without_promise_and_previous_level_it_passes_when_watched_long_enough() -> None:
    config = CanaryConfig(watch_steps=1000)
    few = counters(config.level_steps - 1, 3.0)
    assert judge(counters(999, 1.5), K, config, expected=None, previous=few).decision == "CONTINUE"
    look = judge(counters(1000, 1.5), K, config, expected=None, previous=few)
    assert (look.decision, look.reason.endswith("no evidence of harm in 1000 steps")) == ("PASS", True)


def test_the_interval_matches_the_closed_form_after_one_step() -> None:
    # n = 1, S = 1: M(m) = (1/2) / m, so m is excluded below alpha / 2.
    found = interval(SpecCounters(1, 1 + K, K, K), K, alpha=0.1, design_effect=1.0)
    assert found.low == pytest.approx(1 + K * 0.05)
    assert found.high == pytest.approx(1 + K)
    assert interval(SpecCounters(), K, alpha=0.1, design_effect=1.0) == (1.0, 1.0 + K)


@given(num_steps=st.integers(1, 10**6), share=st.floats(0, 1), effect=st.floats(1, 20))
@settings(deadline=None)
def test_the_interval_holds_what_was_observed_and_stays_in_range(num_steps: int, share: float, effect: float) -> None:
    seen = counters(num_steps, 1 + K * share)
    found = interval(seen, K, alpha=0.01, design_effect=effect)
    assert 1.0 <= found.low <= seen.tau + 1e-9
    assert seen.tau - 1e-9 <= found.high <= 1.0 + K
    wider = interval(seen, K, alpha=0.001, design_effect=effect)
    assert wider.low <= found.low + 1e-9
    assert wider.high >= found.high - 1e-9


def test_the_promise_is_read_from_the_evidence_and_an_override_promises_nothing() -> None:
    evidence = {"challenger_tau": 2.5, "comparison": {"ratio": 1.25, "low": 1.0, "high": 1.5}, "k": 3}
    assert expectation_of({"decision": "passed", "evidence": evidence}) == Expectation(2.5, 2.0, 3.0)
    assert expectation_of({"decision": "override", "evidence": evidence}) is None
    assert expectation_of({}) is None
    assert depth_of({"evidence": evidence}, SpecCounters()) == 3
    assert depth_of({"evidence": evidence}, SpecCounters(100, 200, 390, 100)) == 4


def test_recent_readings_reach_back_over_the_window_and_forget_a_restarted_engine() -> None:
    readings = tuple(counters(steps, 2.0) for steps in (0, 10, 20, 30))
    assert [reading.num_steps for reading in recent(readings, 15)] == [10, 20, 30]
    assert [reading.num_steps for reading in recent((*readings, counters(5, 2.0)), 15)] == [5]
    many = tuple(counters(steps, 2.0) for steps in range(100))
    assert len(recent(many, 10**6)) < 64
    assert recent(many, 10**6)[-1] == many[-1]
    assert not math.isnan(recent(many, 10)[0].tau)


def test_a_stretch_measured_without_the_drafter_is_not_part_of_its_level() -> None:
    served = counters(1000, 2.0)
    without = SpecCounters(2000, 3000, 4000, 1000)  # 1000 more steps, nothing drafted
    after = SpecCounters(2500, 4000, 6000, 1500)
    assert level((SpecCounters(), served, without, after), K) == SpecCounters(1500, 3000, 6000, 1500)
    assert level((after, served), K) == SpecCounters()
    assert level((served,), K) == SpecCounters()

"""The bootstrap: invariances, and its error rates by simulation."""

from __future__ import annotations

import math
import random

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("scipy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from draftloop.pipeline.errors import InputError  # noqa: E402
from draftloop.pipeline.judge.report import ReplayReport, RequestReplay  # noqa: E402
from draftloop.pipeline.judge.statistics import (  # noqa: E402
    UNBOUNDED,
    Paired,
    bootstrap,
    conversations_needed,
    loss_p_value,
    minimum_detectable,
    pair,
    paired_bootstrap,
)


def report(
    name: str, steps: list[int], *, tokens: int = 100, per_conversation: int = 1, **fields: object
) -> ReplayReport:
    requests = tuple(
        RequestReplay(
            record_id=f"r{index:04d}",
            conversation_id=f"c{index // per_conversation:04d}",
            slices={},
            num_tokens=tokens,
            num_steps=count,
            accepted_at_least=(tokens - count,),
        )
        for index, count in enumerate(steps)
    )
    return ReplayReport(**{"drafter": name, "snapshot_id": "s", "k": 1, "requests": requests, **fields})  # type: ignore[arg-type]


STEPS = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=2, max_size=20)


@given(steps=STEPS, seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_estimate_is_the_ratio_of_sums_and_lies_in_its_interval(steps: list[tuple[int, int]], seed: int) -> None:
    ours, theirs = report("b", [b for b, _ in steps]), report("a", [a for _, a in steps])
    found = paired_bootstrap(ours, theirs, seed=seed, num_resamples=200)
    assert found.ratio == pytest.approx(ours.tau / theirs.tau)
    assert found.low <= found.ratio <= found.high
    assert found.num_conversations == len(steps)


@given(steps=STEPS, order=st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_requests_does_not_matter(steps: list[tuple[int, int]], order: random.Random) -> None:
    ours, theirs = report("b", [b for b, _ in steps]), report("a", [a for _, a in steps])
    shuffled = list(theirs.requests)
    order.shuffle(shuffled)
    mixed = ReplayReport(drafter="a", snapshot_id="s", k=1, requests=tuple(shuffled))
    straight = paired_bootstrap(ours, theirs, seed=1, num_resamples=100)
    assert paired_bootstrap(ours, mixed, seed=1, num_resamples=100) == straight


def test_equal_drafters_have_ratio_one_and_no_spread() -> None:
    found = paired_bootstrap(report("b", [30, 50, 70]), report("a", [30, 50, 70]), seed=0)
    assert (found.ratio, found.low, found.high, found.sd, found.minimum_detectable) == (1.0, 1.0, 1.0, 0.0, 0.0)


def test_the_same_seed_gives_the_same_interval_and_another_one_does_not() -> None:
    ours, theirs = report("b", list(range(30, 60))), report("a", [count * 7 % 31 + 30 for count in range(30)])
    assert paired_bootstrap(ours, theirs, seed=3) == paired_bootstrap(ours, theirs, seed=3)
    assert paired_bootstrap(ours, theirs, seed=3) != paired_bootstrap(ours, theirs, seed=4)


def test_a_conversation_counts_once_however_many_requests_it_has() -> None:
    base_b, base_a = [30, 50, 70, 42], [40, 49, 90, 41]
    copies = 4
    wide_b = report("b", [value for value in base_b for _ in range(copies)], per_conversation=copies)
    wide_a = report("a", [value for value in base_a for _ in range(copies)], per_conversation=copies)
    narrow = paired_bootstrap(report("b", base_b), report("a", base_a), seed=2)
    wide = paired_bootstrap(wide_b, wide_a, seed=2)
    assert (wide.ratio, wide.low, wide.high) == pytest.approx((narrow.ratio, narrow.low, narrow.high))
    assert wide.num_conversations == 4


def test_requests_without_a_step_are_no_evidence() -> None:
    found = pair(report("b", [0, 50, 60]), report("a", [0, 55, 60]))
    assert len(found.challenger) == 2
    assert found.num_tokens == 200


def test_too_few_conversations_are_said_and_one_leaves_the_interval_open() -> None:
    found = paired_bootstrap(report("b", [50] * 3), report("a", [60, 61, 62]), seed=0, min_conversations=5)
    assert found.too_few == "too few: 3 conversations, need 5"
    single = paired_bootstrap(report("b", [50]), report("a", [60]), seed=0)
    assert (single.ratio, single.low, single.high) == (1.2, 0.0, UNBOUNDED)
    assert single.too_few == "too few: 1 conversations, need 2"
    empty = paired_bootstrap(report("b", []), report("a", []), seed=0)
    assert (empty.ratio, empty.low, empty.high) == (1.0, 0.0, UNBOUNDED)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (report("a", [50, 60], snapshot_id="t"), "snapshot_id 's'.*has 't'"),
        (report("a", [50, 60], k=2), "k 1.*has 2"),
        (report("a", [50, 60], target="other"), "target ''.*has 'other'"),
        (report("a", [50]), "differ in record r0001"),
        (report("a", [50, 60], tokens=99), "differ in record r0000"),
    ],
)
def test_only_replays_of_the_same_text_are_compared(other: ReplayReport, message: str) -> None:
    with pytest.raises(InputError, match=message):
        paired_bootstrap(report("b", [50, 60]), other, seed=0)


def test_a_doubled_record_is_refused() -> None:
    ours = report("b", [50, 60])
    doubled = ReplayReport(drafter="a", snapshot_id="s", k=1, requests=(*ours.requests, ours.requests[0]))
    with pytest.raises(InputError, match="doubled"):
        paired_bootstrap(ours, doubled, seed=0)


def test_sd_and_power_follow_their_formulas() -> None:
    paired = Paired(np.array([40.0, 60.0]), np.array([50.0, 60.0]), 0)
    # R = 1.1; d = ((50 - 44) / 55, (60 - 66) / 55)
    assert paired.sd == pytest.approx(math.sqrt(2) * 6 / 55)
    assert minimum_detectable(0.1, 196) == pytest.approx(2.8016 * 0.1 / 14, rel=1e-4)
    assert conversations_needed(0.10, 0.02) == 197  # 7.849 * 25, rounded up
    assert conversations_needed(0.15, 0.02) == 442


def test_a_loss_is_shown_only_below_the_threshold() -> None:
    rng = np.random.default_rng(0)
    champion = rng.integers(40, 60, 100).astype(float)
    slower = Paired(champion * 1.1 + rng.normal(0, 2, 100), champion, 0)
    assert loss_p_value(slower, 0.97) < 0.001
    assert loss_p_value(slower, 0.8) > 0.999
    assert loss_p_value(Paired(champion * 1.1, champion, 0), 0.97) == pytest.approx(0, abs=1e-12)
    assert loss_p_value(Paired(champion[:1], champion[:1], 0), 0.97) == 1.0


def simulated(rng: object, count: int, true_ratio: float) -> Paired:
    """Steps of two drafters on `count` conversations of uneven length, alike but not equal."""
    tokens = rng.gamma(2.0, 100.0, count)  # type: ignore[attr-defined]
    shared = rng.lognormal(0.0, 0.3, count)  # type: ignore[attr-defined]
    own, theirs = rng.lognormal(0.0, 0.1, (2, count))  # type: ignore[attr-defined]
    return Paired(tokens * shared * own / true_ratio, tokens * shared * theirs, int(tokens.sum()))


@pytest.mark.parametrize("count", [8, 30, 120])
def test_an_equal_drafter_passes_no_more_often_than_promised_and_intervals_cover(count: int) -> None:
    """A/A and coverage, 1,000 simulated gates. The bounds are the promise plus 3 standard errors of the simulation."""
    rng = np.random.default_rng(20)
    trials, passed, missed = 1000, 0, 0
    for trial in range(trials):
        found = bootstrap(simulated(rng, count, 1.0), seed=trial, num_resamples=400)
        passed += found.low > 1.0
        missed += not found.low <= 1.0 <= found.high
    assert passed / trials <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / trials)
    assert 0.025 < missed / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_a_gain_of_the_detectable_size_is_found_about_four_times_in_five() -> None:
    rng = np.random.default_rng(5)
    trials, count = 300, 100
    size = float(
        np.mean([bootstrap(simulated(rng, count, 1.0), seed=0, num_resamples=10).minimum_detectable for _ in range(50)])
    )
    found = sum(bootstrap(simulated(rng, count, 1 + size), seed=t, num_resamples=400).low > 1 for t in range(trials))
    assert 0.7 < found / trials < 0.9

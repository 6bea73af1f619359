"""Speed: the measurement on an engine with its own clock, and the theory against its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.pipeline.errors import InputError
from draftloop.pipeline.judge import speed
from draftloop.pipeline.records import Swapped

pytest.importorskip("scipy")

DRAFTER = (Path("drafter"), "7")


@dataclass
class Done:
    output_ids: tuple[int, ...]


@dataclass
class TimedEngine:
    """Serves a group in `step_s` a token, divided by tau with the drafter; the machine slows down as time goes on."""

    tau: float = 2.0
    step_s: float = 0.01
    drift: float = 0.0
    now: float = 0.0
    drafting: bool = False
    tie: bool = False
    groups: list[tuple[bool, int]] = field(default_factory=list)

    def swap(self, folder: Path | None, version: str | None) -> Swapped:
        assert (folder, version) in ((None, None), DRAFTER)
        self.drafting = folder is not None
        return Swapped("", 0.0)

    def generate(self, requests: Sequence[int]) -> list[Done]:
        self.groups.append((self.drafting, len(requests)))
        seconds = max(requests) * self.step_s * (1 + self.drift * self.now)
        self.now += seconds / self.tau if self.drafting else seconds
        return [Done((int(self.tie and self.drafting), *range(1, length))) for length in requests]

    def clock(self) -> float:
        return self.now


def test_the_measured_ratio_is_the_engines_own() -> None:
    engine = TimedEngine(tau=1.5)
    report = speed.measure(engine, DRAFTER, [100, 100, 100], batches=(1, 2), pairs=2, clock=engine.clock)
    assert [result.batch for result in report.results] == [1, 2]
    for result in report.results:
        assert result.ratio == pytest.approx(1.5)
        assert result.low == pytest.approx(1.5)
        assert result.high == pytest.approx(1.5)
        assert result.num_tokens == 300
    assert report.results[0].without_tokens_per_s == pytest.approx(100)
    assert report.results[1].with_tokens_per_s == pytest.approx(
        225
    )  # two groups of 2 and 1: 300 tokens in 2 x 1 / 1.5 s


def test_arms_alternate_abba_after_one_untimed_run_each() -> None:
    engine = TimedEngine()
    speed.measure(engine, DRAFTER, [10], batches=(1,), pairs=4, clock=engine.clock)
    order = "".join("B" if drafting else "A" for drafting, _ in engine.groups)
    assert order == "BA" + "ABBAABBA"


def test_drift_of_the_machine_cancels() -> None:
    engine = TimedEngine(tau=1.0, drift=0.01)
    result = speed.measure(engine, DRAFTER, [100] * 4, batches=(4,), pairs=4, clock=engine.clock).results[0]
    assert result.ratio == pytest.approx(1.0, abs=2e-3)
    assert result.low < 1.0 < result.high


def test_requests_go_in_groups_of_the_batch_size() -> None:
    engine = TimedEngine()
    speed.measure(engine, DRAFTER, [5] * 5, batches=(2,), pairs=1, clock=engine.clock)
    assert [size for _, size in engine.groups[:3]] == [2, 2, 1]


def test_outputs_that_differ_between_the_arms_are_counted() -> None:
    engine = TimedEngine(tie=True)
    assert speed.measure(engine, DRAFTER, [5, 6], pairs=1, clock=engine.clock).results[0].num_differing == 2
    engine = TimedEngine()
    assert speed.measure(engine, DRAFTER, [5, 6], pairs=1, clock=engine.clock).results[0].num_differing == 0


def test_the_drafter_stays_loaded_at_the_end() -> None:
    engine = TimedEngine()
    speed.measure(engine, DRAFTER, [5], pairs=2, clock=engine.clock)
    assert engine.drafting


def test_progress_counts_every_run() -> None:
    engine, seen = TimedEngine(), []
    speed.measure(engine, DRAFTER, [5], batches=(1, 8), pairs=2, clock=engine.clock, on_progress=seen.append)
    assert [progress.runs for progress in seen] == list(range(1, 13))
    assert {progress.total_runs for progress in seen} == {12}


@pytest.mark.parametrize(
    ("requests", "batches", "pairs"), [([], (1,), 1), ([5], (), 1), ([5], (0,), 1), ([5], (1,), 0)]
)
def test_a_plan_that_measures_nothing_is_refused(requests: list[int], batches: tuple[int, ...], pairs: int) -> None:
    with pytest.raises(InputError, match="cannot be measured"):
        speed.measure(TimedEngine(), DRAFTER, requests, batches=batches, pairs=pairs)


def test_a_report_survives_json_exactly_and_is_plain_by_batch() -> None:
    engine = TimedEngine()
    report = speed.measure(engine, DRAFTER, [5], batches=(1, 8), pairs=1, clock=engine.clock)
    assert speed.SpeedReport.from_json(report.to_json()) == report
    assert report.results[0].high == speed.UNBOUNDED  # one pair says nothing about spread
    assert list(report.by_batch()) == ["1", "8"]
    assert report.by_batch()["8"]["ratio"] == report.results[1].ratio
    with pytest.raises(InputError, match="not a speed report"):
        speed.SpeedReport.from_json(b"[]")


def test_the_interval_is_students_on_the_logs() -> None:
    mean, low, high = speed.geometric_interval([1.0, math.e])
    half = 12.706205 * (1 / math.sqrt(2)) / math.sqrt(2)
    assert (math.log(mean), math.log(low), math.log(high)) == pytest.approx((0.5, 0.5 - half, 0.5 + half))


TIMES = st.floats(1e-4, 1.0)


@given(plain=TIMES, draft=TIMES, verify=TIMES, overhead=TIMES)
def test_at_break_even_drafting_gains_nothing(plain: float, draft: float, verify: float, overhead: float) -> None:
    times = speed.StepTimes(plain, draft, verify, overhead)
    assert speed.speedup(speed.break_even_tau(times), times) == pytest.approx(1.0)


def test_break_even_counts_draft_verify_and_overhead() -> None:
    times = speed.StepTimes(plain=0.010, draft=0.002, verify=0.011, overhead=0.001)
    assert speed.break_even_tau(times) == pytest.approx(1.4)
    assert speed.speedup(2.1, times) == pytest.approx(1.5)


def test_only_the_decode_share_speeds_up() -> None:
    assert speed.end_to_end_speedup(2.0, decode_share=0.5) == pytest.approx(4 / 3)
    assert speed.end_to_end_speedup(2.0, decode_share=1.0) == 2.0
    assert speed.end_to_end_speedup(2.0, decode_share=0.0) == 1.0


@given(alpha=st.floats(0, 1), k=st.integers(1, 12))
def test_independent_tau_is_its_geometric_sum(alpha: float, k: int) -> None:
    assert speed.independent_tau(alpha, k) == pytest.approx(sum(alpha**power for power in range(k + 1)), rel=1e-6)


def test_the_best_k_balances_acceptance_and_cost() -> None:
    rates = (0.7, 0.4, 0.2, 0.05)
    assert speed.tau_at(rates, 2) == pytest.approx(2.1)
    times = {k: speed.StepTimes(1.0, 0.05 * k, 1.0 + 0.02 * k) for k in (1, 2, 3, 4)}
    k, gain = speed.best_k(rates, times)
    assert k == 3
    assert gain == pytest.approx(2.3 / 1.21)
    dear = {k: speed.StepTimes(1.0, 0.5 * k, 1.0 + k) for k in (1, 2)}
    assert speed.best_k(rates, dear) == (0, 1.0)
    assert speed.best_k(rates, {}) == (0, 1.0)


@pytest.mark.parametrize(
    ("context", "batch", "milliseconds"), [(1024, 1, 4.2), (1024, 32, 5.4), (1024, 256, 13.8), (8192, 64, 23.5)]
)
def test_the_roofline_gives_the_published_step_times(context: int, batch: int, milliseconds: float) -> None:
    """An 8B target on one H200 in bf16."""
    machine = speed.Machine(bytes_per_s=4.0e12, flops_per_s=790e12, launch_s=60e-6)
    model = speed.ModelCost(weight_bytes=16.4e9, kv_bytes_per_token=147.5e3, flops_per_token=16.4e9)
    found = speed.roofline_step_s(machine, model, batch=batch, tokens=1, context=context)
    assert found * 1000 == pytest.approx(milliseconds, abs=0.06)


def test_a_step_with_many_tokens_is_bound_by_arithmetic() -> None:
    machine = speed.Machine(bytes_per_s=1e12, flops_per_s=1e14)
    model = speed.ModelCost(
        weight_bytes=1e9, kv_bytes_per_token=0, flops_per_token=1e9, flops_per_token_and_context=1e3
    )
    assert speed.roofline_step_s(machine, model, batch=1, tokens=1, context=0) == pytest.approx(1e-3)
    assert speed.roofline_step_s(machine, model, batch=100, tokens=4, context=1000) == pytest.approx(4.004e-3)

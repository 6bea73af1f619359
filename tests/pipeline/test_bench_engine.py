"""The engine benches' own arithmetic: outputs compared where they part, intervals, and what a person is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from draftloop.pipeline import bench_tables
from draftloop.pipeline.bench_engine import UNKNOWN_MARGIN, Outputs
from draftloop.pipeline.bench_site import median_interval, spread
from draftloop.pipeline.completions import Answer
from draftloop.pipeline.config import Config
from draftloop.pipeline.demo import demo_config
from draftloop.pipeline.rollout.engine_client import Scores


def answer(name: str, *ids: int) -> Answer:
    return Answer(name, (1, 2), ids, "length", 0.0, 1.0)


class Scorer:
    """The engine's /score: the last token's margin is what it is told."""

    def __init__(self, margins: tuple[float, float]) -> None:
        self.margins = margins
        self.asked: list[Any] = []

    def score(self, prompts: Any, outputs: Any) -> Scores:
        self.asked.append([list(output) for output in outputs])
        found = tuple((0.0,) * (len(output) - 1) + (last,) for output, last in zip(outputs, self.margins, strict=True))
        return Scores((), (), found)


def outputs(scorer: Scorer, *, dtype: str) -> Outputs:
    target = SimpleNamespace(fingerprint=SimpleNamespace(dtype=dtype))
    site: Any = SimpleNamespace(target=target, client=scorer, workspace=SimpleNamespace(config=Config()))
    return Outputs(site, [answer("p", 5, 6, 7), answer("q", 8, 9)])


def test_in_bf16_outputs_may_part_at_a_near_tie_and_nowhere_else() -> None:
    near, far = Scorer((0.0, 0.25)), Scorer((0.0, 3.0))
    same, parted = answer("p#1", 5, 6, 7), answer("p#2", 5, 9, 9)
    assert outputs(near, dtype="bfloat16").compare([same, parted]) == {
        "compared": 2,
        "identical": 1,
        "near_ties": 1,
        "others": 0,
        "largest_margin": 0.25,
    }
    assert near.asked == [[[5, 6], [5, 9]]], "scored up to where they part"
    found = outputs(far, dtype="bfloat16").compare([parted, parted])
    assert (found["near_ties"], found["others"], far.asked) == (0, 2, [[[5, 6], [5, 9]]])


def test_in_fp32_any_difference_counts() -> None:
    found = outputs(Scorer((0.0, 0.0)), dtype="float32").compare([answer("p#1", 5, 9)])
    assert (found["near_ties"], found["others"]) == (0, 1)


def test_an_output_that_ends_early_is_truncated_and_no_tie() -> None:
    seen = outputs(Scorer((0.0, 0.0)), dtype="bfloat16")
    short = answer("p#1", 5, 6)
    assert [seen.is_truncated(each) for each in (short, answer("p#2", 5, 6, 7), answer("p#3", 9))] == [
        True,
        False,
        False,
    ]
    assert seen.compare([short])["largest_margin"] == UNKNOWN_MARGIN


def test_the_interval_of_the_median_holds_it_and_is_repeatable() -> None:
    values = [0.99, 1.0, 1.01, 1.0, 0.998, 1.002, 1.0, 0.997, 1.003, 1.0]
    low, high = median_interval(values, seed=1)
    assert 0.997 <= low <= 1.0 <= high <= 1.003
    assert median_interval(values, seed=1) == (low, high)
    assert median_interval([2.0], seed=1) == (2.0, 2.0)


def test_a_spread_names_count_median_p99_and_maximum() -> None:
    assert spread(list(map(float, range(1, 201)))) == {"count": 200, "median": 100.5, "p99": 198.0, "max": 200.0}
    assert spread([]) == {"count": 0, "median": 0.0, "p99": 0.0, "max": 0.0}


def test_a_person_is_told_what_differs_and_what_does_not() -> None:
    all_same = {"compared": 9, "identical": 9, "near_ties": 0, "others": 0, "largest_margin": 0.0}
    found = {
        "swaps": 20,
        "streams": 8,
        "dtype": "bfloat16",
        "pause_ms": spread([60.0, 62.0]),
        "swap_ms": spread([500.0]),
        "gap_ms": {"with_swaps": spread([70.0]), "without": spread([50.0])},
        "requests": {"served": 33, "failed": 0, "truncated": 1},
        "outputs": {"with_swaps": {**all_same, "identical": 7, "near_ties": 2}, "without": all_same},
        "memory_mb": {"first": 3000.0, "last": 3001.0, "most": 3001.0, "growth_after_first_quarter": 0.5},
        "target_unchanged": True,
        "drafter_as_loaded": False,
    }
    text = bench_tables.swap(found)
    assert "pause: median 61 ms" in text
    assert "33 requests during the swaps, 0 failed, 1 truncated" in text
    assert "outputs with swaps: 7 of 9 identical, 2 part at near ties, 0 elsewhere" in text
    assert "outputs without: all 9 identical" in text
    assert "target's weights unchanged: yes; the drafter is the one that was loaded: NO" in text


def test_a_demo_on_vllm_serves_enough_of_one_drafter_to_compare_replay_and_engine() -> None:
    config = demo_config([], ["engine=vllm"], None)
    assert config.demo.shifted_requests * 0.95 >= 200  # every twentieth tenant has not consented
    assert demo_config([], ["engine=vllm", "demo.shifted_requests=30"], None).demo.shifted_requests == 30
    assert demo_config([], [], None).demo.shifted_requests == 140

"""Order and learning rate are pure functions: of sizes, seed and step."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.trainers.config import TrainConfig
from draftloop.trainers.progress import Plan
from draftloop.trainers.schedule import learning_rate


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(16, 400), st.integers(0, 5))
def test_every_epoch_visits_every_document_once(sizes: list[int], budget: int, seed: int) -> None:
    plan = Plan(tuple(sizes), budget, 2, seed)
    for epoch in range(2):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        visited = [document for step in steps for document in plan.documents(step)]
        assert sorted(visited) == list(range(len(sizes)))


def test_epochs_differ_in_order_and_a_seed_fixes_it() -> None:
    plan = Plan((5,) * 30, 50, 3, seed=1)
    first = [plan.documents(step) for step in range(plan.steps_per_epoch)]
    second = [plan.documents(step) for step in range(plan.steps_per_epoch, 2 * plan.steps_per_epoch)]
    assert first != second
    assert first == [Plan((5,) * 30, 50, 3, seed=1).documents(step) for step in range(plan.steps_per_epoch)]
    assert first != [Plan((5,) * 30, 50, 3, seed=2).documents(step) for step in range(plan.steps_per_epoch)]


def test_no_documents_still_make_a_plan_of_one_step() -> None:
    assert Plan((), 100, 1, 0).num_steps == 1


def test_the_rate_warms_up_once_peaks_and_ends_at_the_floor() -> None:
    config = TrainConfig(learning_rate=1.0, warmup_fraction=0.1, final_lr_fraction=0.05)
    rates = [learning_rate(step, 100, config, warm=False) for step in range(101)]
    assert rates[:10] == [(step + 1) / 11 for step in range(10)]
    assert rates[10] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))
    assert abs(rates[100] - 0.05) < 1e-12


def test_a_warm_start_peaks_at_its_own_rate() -> None:
    config = TrainConfig(learning_rate=1.0, warm_learning_rate=0.1, warmup_fraction=0.0)
    assert learning_rate(0, 10, config, warm=True) == 0.1

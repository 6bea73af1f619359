"""Quotas of replay, order and split: deterministic, bounded, and fair over slices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.pipeline.data.mixture import is_heldout, quotas, rank, replay_rows


@pytest.mark.parametrize(
    ("available", "total", "expected"),
    [
        ({"a": 10, "b": 10}, 10, {"a": 5, "b": 5}),
        ({"b": 10, "a": 10}, 5, {"a": 2, "b": 3}),
        ({"a": 2, "b": 10, "c": 10}, 12, {"a": 2, "b": 5, "c": 5}),
        ({"a": 1, "b": 2}, 99, {"a": 1, "b": 2}),
        ({"a": 4}, 0, {"a": 0}),
        ({}, 3, {}),
    ],
)
def test_places_are_shared_evenly_and_unused_ones_passed_on(
    available: dict[str, int], total: int, expected: dict[str, int]
) -> None:
    assert quotas(available, total) == expected


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=6), st.integers(0, 200))
def test_quotas_fill_exactly_and_never_exceed_what_is_there(available: dict[str, int], total: int) -> None:
    given_places = quotas(available, total)
    assert sum(given_places.values()) == min(total, sum(available.values()))
    assert all(0 <= given_places[name] <= count for name, count in available.items())
    short = [given_places[name] for name in available if given_places[name] < available[name]]
    assert not short or max(short) - min(short) <= 1
    assert max(given_places.values(), default=0) <= min(short, default=200) + 1


@pytest.mark.parametrize(
    ("num_new", "share", "expected"), [(100, 0.0, 0), (100, 0.5, 100), (75, 0.25, 25), (0, 0.5, 0)]
)
def test_the_share_is_of_new_and_old_together(num_new: int, share: float, expected: int) -> None:
    assert replay_rows(num_new, share) == expected


@given(st.text(max_size=20), st.floats(0.01, 0.98), st.floats(0.0, 0.5))
def test_a_larger_fraction_only_adds_held_out_conversations(conversation: str, fraction: float, more: float) -> None:
    if is_heldout("s", conversation, fraction):
        assert is_heldout("s", conversation, min(1.0, fraction + more))


def test_the_split_hits_its_fraction_and_is_the_same_for_ever() -> None:
    conversations = [f"c-{index}" for index in range(4000)]
    held = [name for name in conversations if is_heldout("draftloop", name, 0.25)]
    assert abs(len(held) / 4000 - 0.25) < 0.03
    # Written down once: a change of the rule would move conversations across the split in running deployments.
    assert held[:5] == ["c-1", "c-2", "c-4", "c-10", "c-14"]
    assert not any(is_heldout("draftloop", name, 0.0) for name in conversations)
    assert all(is_heldout("draftloop", name, 1.0) for name in conversations)


def test_rank_separates_salt_from_name() -> None:
    assert rank("a", "bc") != rank("ab", "c")

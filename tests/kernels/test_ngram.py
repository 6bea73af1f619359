"""The n-gram floor against its definition, tried n by n."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.kernels.ngram import propose_ngram


def by_definition(ids: list[int], k: int, max_n: int, min_n: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        if len(ids) <= n:
            continue
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n : start + n + k]
    return []


@given(
    ids=st.lists(st.integers(0, 3), max_size=30),
    k=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_the_scan_equals_the_definition(ids: list[int], k: int, sizes: tuple[int, int]) -> None:
    min_n, max_n = sorted(sizes)
    assert propose_ngram(ids, k=k, max_n=max_n, min_n=min_n) == by_definition(ids, k, max_n, min_n)


def test_the_longest_ngram_wins_over_a_more_recent_shorter_one() -> None:
    assert propose_ngram([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], k=2) == [9, 2]


def test_the_most_recent_of_equal_occurrences_wins() -> None:
    assert propose_ngram([1, 2, 5, 1, 2, 6, 1, 2], k=1) == [6]


def test_an_overlapping_occurrence_continues_a_run_of_one_token() -> None:
    assert propose_ngram([4, 4, 4], k=3) == [4]


def test_nothing_is_proposed_without_an_earlier_occurrence() -> None:
    assert propose_ngram([1, 2, 3, 4], k=3) == []
    assert propose_ngram([], k=3) == []


def test_bad_sizes_are_refused_by_value() -> None:
    with pytest.raises(ValueError, match="k=0"):
        propose_ngram([1], k=0)
    with pytest.raises(ValueError, match="min_n=3"):
        propose_ngram([1], k=1, max_n=2, min_n=3)

"""The draft vocabulary is always full, ascending, inside the target's, and holds what stops a sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.pipeline.errors import ConfigError
from draftloop.trainers.vocabulary import choose_draft_tokens, count_output_tokens, coverage


def test_forty_distinct_tokens_fill_a_vocabulary_of_sixty_four_with_the_lowest_unused_ids() -> None:
    outputs = [list(range(80, 120)), [80, 81, 82]]
    counts = count_output_tokens(outputs, 136)
    tokens = choose_draft_tokens(counts, 64, always=[1], vocab_size=131)
    assert tokens.tolist() == [*range(24), *range(80, 120)]


def test_the_most_frequent_tokens_win_and_ties_go_to_the_lower_id() -> None:
    counts = count_output_tokens([[9, 9, 9, 7, 5, 5, 3]], 12)
    assert choose_draft_tokens(counts, 3).tolist() == [3, 5, 9]


def test_end_of_sequence_is_kept_even_if_no_output_holds_it() -> None:
    counts = count_output_tokens([[9, 9, 8, 8]], 12)
    assert choose_draft_tokens(counts, 2, always=[11]).tolist() == [8, 11]


def test_padding_rows_of_the_head_are_never_chosen() -> None:
    counts = torch.zeros(136, dtype=torch.int64)
    assert choose_draft_tokens(counts, 131, vocab_size=131).tolist() == list(range(131))
    with pytest.raises(ConfigError, match="draft_vocab_size = 132"):
        choose_draft_tokens(counts, 132, vocab_size=131)


def test_coverage_is_the_share_of_counted_tokens() -> None:
    counts = count_output_tokens([[1, 1, 1, 2]], 4)
    assert coverage(counts, torch.tensor([1])) == 0.75
    assert coverage(torch.zeros(4, dtype=torch.int64), torch.tensor([1])) == 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 49), max_size=20), max_size=6), st.integers(1, 50), st.integers(0, 49))
def test_any_counts_give_a_full_strictly_increasing_map(outputs: list[list[int]], size: int, always: int) -> None:
    tokens = choose_draft_tokens(count_output_tokens(outputs, 50), size, always=[always])
    assert tokens.shape == (size,)
    assert (tokens.diff() > 0).all()
    assert tokens[0] >= 0
    assert tokens[-1] < 50
    assert always in tokens

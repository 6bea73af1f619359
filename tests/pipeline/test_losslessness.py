"""What counts as lossless: equality, or a first difference at a near tie."""

from __future__ import annotations

import pytest

from draftloop.pipeline.errors import InputError
from draftloop.pipeline.losslessness import Comparison, Divergence, compare_greedy
from draftloop.pipeline.records import ProbeResult, SpecCounters


def probe(*outputs: tuple[int, ...], margins: tuple[tuple[float, ...], ...] | None = None) -> ProbeResult:
    return ProbeResult(outputs, margins or tuple((1.0,) * len(ids) for ids in outputs), SpecCounters())


def test_equal_outputs_are_identical() -> None:
    assert compare_greedy(probe((1, 2), (3,)), probe((1, 2), (3,)), 0.0) == Comparison(True, ())


def test_a_difference_at_a_clear_margin_is_a_loss_and_is_named() -> None:
    a, b = probe((1,), (3, 4, 5)), probe((1,), (3, 9, 9))
    assert compare_greedy(a, b, 0.5) == Comparison(False, (Divergence(1, 1, 1.0, False),))


def test_a_difference_at_a_near_tie_is_let_pass_and_listed() -> None:
    a = probe((3, 4, 5), margins=((2.0, 0.25, 2.0),))
    b = probe((3, 9, 8), margins=((2.0, 0.1, 2.0),))
    assert compare_greedy(a, b, 0.25) == Comparison(True, (Divergence(0, 1, 0.1, True),))
    assert not compare_greedy(a, b, 0.05).lossless


def test_only_the_first_difference_of_a_prompt_counts() -> None:
    a = probe((3, 4, 5), margins=((0.1, 2.0, 2.0),))
    b = probe((2, 8, 9), margins=((0.1, 2.0, 2.0),))
    assert compare_greedy(a, b, 0.2).divergences == (Divergence(0, 0, 0.1, True),)


def test_an_output_that_ends_early_is_never_a_tie() -> None:
    a, b = probe((3, 4), margins=((0.0, 0.0),)), probe((3,), margins=((0.0,),))
    assert compare_greedy(a, b, 9.0) == Comparison(False, (Divergence(0, 1, 0.0, False),))


def test_probes_of_other_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="1 and 2 prompts"):
        compare_greedy(probe((1,)), probe((1,), (2,)), 0.0)
    with pytest.raises(InputError, match="margin"):
        compare_greedy(probe((1,)), probe((1,), margins=((),)), 0.0)

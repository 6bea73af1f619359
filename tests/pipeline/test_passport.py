"""The card holds the whole decision; the pictures hold what they are given."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from draftloop.pipeline.errors import ConfigError
from draftloop.pipeline.registry.passport import (
    Cost,
    Facts,
    Gain,
    SliceRow,
    card,
    plots,
    position_plot,
    slice_plot,
    slice_table,
    tags,
    training_plot,
)

SLICES = (
    SliceRow(name="kitchen", challenger_tau=2.6, champion_tau=2.0, ratio=1.3, low=1.2, high=1.4, num_conversations=40),
    SliceRow(
        name="py|<b>",
        challenger_tau=1.8,
        champion_tau=2.0,
        ratio=0.9,
        low=0.85,
        high=0.95,
        num_conversations=20,
        lost=True,
    ),
    SliceRow(
        name="rare",
        challenger_tau=2.0,
        champion_tau=2.0,
        ratio=1.0,
        low=0.5,
        high=2.0,
        num_conversations=2,
        judged=False,
    ),
)
FACTS = Facts(
    name="drafter",
    job_key="a1b2",
    digest="d" * 64,
    decision="passed",
    reasons=("tau rises by 25.0% (20.0% to 30.0%), over the margin of 1.0%",),
    target="smollm2",
    fingerprint="f" * 16,
    snapshot_id="5" * 64,
    window={"topic": "draftloop.raw.x", "offsets": "0:0-100"},
    captured=100,
    rejected={"aborted": 3, "too long": 7},
    num_train=85,
    num_heldout=10,
    carried=5,
    gain=Gain(
        challenger_tau=2.5,
        champion_tau=2.0,
        ratio=1.25,
        low=1.2,
        high=1.3,
        confidence=0.95,
        num_conversations=62,
        num_tokens=5000,
        challenger_rates=(0.7, 0.4, 0.25, 0.15),
        champion_rates=(0.6, 0.25, 0.1, 0.05),
        slices=SLICES,
    ),
    cost=Cost(num_steps=300, num_tokens=123456, seconds=61.4, tokens_per_s=2010.7, peak_memory_mb=1234),
    champion="3",
    parents=("p" * 64,),
    settings={"lr": 0.001, "num_steps": 300},
)


def test_the_card_holds_the_whole_decision() -> None:
    text = card(FACTS)
    for part in (
        "# drafter: tau 2.00 to 2.50 (+25.0%, 95% interval +20.0% to +30.0%)",
        "**The gate passed it**, compared with champion 3 on 62 held-out conversations (5000 tokens)",
        "- tau rises by 25.0% (20.0% to 30.0%), over the margin of 1.0%",
        "| **all** | 2.000 | 2.500 | +25.0% | +20.0% to +30.0% | 62 |  |",
        "| kitchen | 2.000 | 2.600 | +30.0% | +20.0% to +40.0% | 40 |  |",
        "| rare | 2.000 | 2.000 | +0.0% | -50.0% to +100.0% | 2 | too few to judge |",
        "accepted in 70%, 40%, 25%, 15% of the steps; the champion: 60%, 25%, 10%, 5%.",
        f"Snapshot `{'5' * 64}`",
        "offsets 0:0-100; topic draftloop.raw.x",
        "100 records captured = 90 kept + 10 rejected",
        "85 rows for training, 10 held out; 5 of them carried over",
        "Rejected: aborted 3, too long 7",
        "61 s for 300 steps over 123456 tokens (2011 tokens/s), peak memory 1234 MB.",
        "Warm start from `pppppppppppp`",
        "lr 0.001, num_steps 300",
        "    draftloop rollback 3\n",
    ):
        assert part in text
    assert len(text) < 20_000  # what MLflow takes as a description


def test_a_name_from_traffic_can_neither_break_the_table_nor_bring_markup() -> None:
    assert "| py&#124;&lt;b&gt; | 2.000 | 1.800 | -10.0% | -15.0% to -5.0% | 20 | **loses** |" in card(FACTS)


def test_the_first_drafter_says_that_there_is_nothing_to_go_back_to() -> None:
    text = card(replace(FACTS, champion=None, parents=()))
    assert "compared with the engine without a drafter of its own" in text
    assert "Trained from the start, without a parent" in text
    assert "There is no earlier champion." in text
    assert "draftloop rollback" not in text


@pytest.mark.parametrize(("decision", "words"), [("refused", "REFUSED"), ("override", "OVERRIDE")])
def test_a_refused_drafter_says_so_in_the_first_lines(decision: str, words: str) -> None:
    assert words in card(replace(FACTS, decision=decision)).split("##")[0]  # type: ignore[arg-type]


def test_a_ledger_that_does_not_add_up_makes_no_card() -> None:
    with pytest.raises(ConfigError, match="101 captured, but 90 kept and 10 rejected"):
        card(replace(FACTS, captured=101))


def test_a_version_has_five_short_tags() -> None:
    assert tags(FACTS) == {
        "gate": "passed",
        "gain": "+25.0% (+20.0% to +30.0%)",
        "tau": "2.500",
        "target": "f" * 16,
        "digest": "d" * 12,
    }


def test_the_slice_table_has_one_row_a_slice() -> None:
    table = slice_table(SLICES)
    assert table["name"] == ["kitchen", "py|<b>", "rare"]
    assert {len(column) for column in table.values()} == {3}


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_pictures_are_png_and_equal_for_equal_data() -> None:
    history = [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0, "heldout_tau": 1.8}]
    found = plots(FACTS.gain, history)
    assert sorted(found) == ["acceptance_by_position.png", "gain_by_slice.png", "training.png"]
    assert {name: size_of(png)[0] for name, png in found.items()} == dict.fromkeys(found, 720)
    assert found == plots(FACTS.gain, history)
    assert found["training.png"] != training_plot(history[:1])
    assert position_plot((0.5,), ()) != position_plot((0.4,), ())


def test_pictures_without_data_are_left_out() -> None:
    assert sorted(plots(replace(FACTS.gain, slices=()), [])) == ["acceptance_by_position.png"]


def test_a_slice_named_like_mathematics_is_drawn_as_text() -> None:
    assert size_of(slice_plot([replace(SLICES[0], name="$\\frac$ 50% $")]))[0] == 720


def test_an_interval_about_which_nothing_is_known_says_so() -> None:
    unknown = replace(SLICES[2], low=0.0, high=1e9)
    text = card(replace(FACTS, gain=replace(FACTS.gain, slices=(unknown,))))
    assert "| rare | 2.000 | 2.000 | +0.0% | not known | 2 | too few to judge |" in text
    assert size_of(slice_plot([unknown]))[0] == 720

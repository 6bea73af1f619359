"""The demo's prompts: enough, distinct, short, and the project's own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from draftloop.pipeline.data.prompts import DOMAINS, Domain, prompts

SPEC_BENCH = Path(__file__).parents[3] / "shared" / "data" / "spec_bench"


def words(text: str) -> list[str]:
    return "".join(letter.lower() if letter.isalnum() else " " for letter in text).split()


@pytest.mark.parametrize("domain", DOMAINS)
def test_there_are_enough_and_no_two_are_equal(domain: Domain) -> None:
    found = prompts(domain)
    assert len(found) >= 360
    assert len({" ".join(words(text)) for text in found}) == len(found)


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_is_a_short_question_with_no_gap_left(domain: Domain) -> None:
    for text in prompts(domain):
        assert 8 <= len(text.split()) <= 30
        assert text == text.strip()
        assert text.isascii()
        assert "{" not in text
        assert text[-1] in ".?"


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_order_is_fixed_and_the_list_is_the_caller_s_own(domain: Domain) -> None:
    first = prompts(domain)
    prompts(domain).clear()
    assert prompts(domain) == first


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_prefix_is_as_mixed_as_the_whole(domain: Domain) -> None:
    openings = Counter(" ".join(text.split()[:4]) for text in prompts(domain)[:40])
    assert len(openings) >= 12


def test_the_domains_share_no_prompt_and_few_words() -> None:
    kitchen, python = ({word for text in prompts(domain) for word in words(text)} for domain in DOMAINS)
    assert not set(prompts("kitchen")) & set(prompts("python"))
    assert len(kitchen & python) / len(kitchen | python) < 0.15
    assert all("python" in text.lower() for text in prompts("python"))
    assert "python" not in kitchen


def test_none_is_a_prompt_of_an_evaluation_set() -> None:
    if not SPEC_BENCH.is_dir():
        pytest.skip("the evaluation prompts are not here")
    theirs = {
        " ".join(words(turn))
        for path in SPEC_BENCH.glob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
        for turn in json.loads(line)["turns"]
    }
    assert len(theirs) > 1000
    ours = {" ".join(words(text)) for domain in DOMAINS for text in prompts(domain)}
    assert not ours & theirs

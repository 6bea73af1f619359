"""The demo's traffic: repeatable, split-stable, and only some of it permitted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from draftloop.pipeline import traffic


class WordTokenizer:
    """Ids by word, no template: enough to tell requests apart."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [self.known.setdefault(word, len(self.known)) for word in messages[0]["content"].split()]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    tokenizer = WordTokenizer()
    monkeypatch.setattr(traffic, "render_prompt", lambda known, messages: known.apply_chat_template(messages))
    return SimpleNamespace(tokenizer=tokenizer)


def requests(target: Any, *, round_number: int = 0, seed: int = 0, count: int = 100) -> list[Any]:
    return traffic.domain_requests(target, "kitchen", count=count, round_number=round_number, seed=seed, max_tokens=8)


def test_the_same_seed_and_round_give_the_same_requests(target: Any) -> None:
    assert requests(target) == requests(target)
    assert requests(target) != requests(target, seed=1)


def test_the_next_round_draws_other_prompts_until_all_were_used(target: Any) -> None:
    first = {one.prompt_ids for one in requests(target)}
    second = {one.prompt_ids for one in requests(target, round_number=1)}
    assert not first & second


def test_a_prompt_keeps_its_conversation_in_every_round(target: Any) -> None:
    of_prompt = {one.prompt_ids: one.conversation_id for one in requests(target, count=360)}
    for one in requests(target, round_number=4, count=90):
        assert of_prompt.get(one.prompt_ids, one.conversation_id) == one.conversation_id


def test_every_twentieth_request_has_no_permission(target: Any) -> None:
    tenants = [one.tenant for one in requests(target)]
    assert tenants.count(traffic.NOT_CONSENTING) == 5
    assert tenants.count(traffic.CONSENTING) == 95


def test_a_measurement_is_the_same_request_of_a_tenant_that_permits_nothing(target: Any) -> None:
    asked = requests(target, count=3)
    measured = traffic.measured_again(asked, "again")
    assert [one.prompt_ids for one in measured] == [one.prompt_ids for one in asked]
    assert {one.tenant for one in measured} == {traffic.MEASURING}
    assert not {one.request_id for one in measured} & {one.request_id for one in asked}

"""What vLLM hands to our counting may change with a release: no request is to notice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftloop.pipeline.records import SpecCounters
from draftloop.serving_hooks.vllm import counting
from draftloop.serving_hooks.vllm.runtime import Runtime


class Refused:
    """Counts what a hook would."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def refuse(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(hook=Refused())  # type: ignore[arg-type]
    monkeypatch.setattr(counting, "current", lambda: made)
    return made


def test_outputs_of_an_unknown_form_are_processed_all_the_same(runtime: Runtime) -> None:
    def plain(self: Any, outputs: Any) -> str:
        return f"processed {len(outputs)}"

    odd = [SimpleNamespace(request_id="r")]  # without new_token_ids
    assert counting._noticing(plain)(SimpleNamespace(request_states={}), odd) == "processed 1"
    assert runtime.hook.reasons == ["unexpected"]  # type: ignore[union-attr]


def test_our_own_requests_end_whatever_their_metrics_look_like(runtime: Runtime) -> None:
    state = SimpleNamespace(make_request_output=lambda tokens: f"out {tokens}", spec_decode_metrics=object())
    counting.discount_internal(runtime, state)
    assert state.make_request_output([1]) == "out [1]"
    assert runtime.hook.reasons == ["unexpected"]  # type: ignore[union-attr]
    assert runtime.counters == SpecCounters()

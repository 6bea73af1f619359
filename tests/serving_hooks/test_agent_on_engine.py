"""The agent on the real embedded engine: what the in-memory twins promise is what the engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from draftloop.pipeline.artifact import MARKER  # noqa: E402
from draftloop.pipeline.records import Sampling  # noqa: E402
from draftloop.pipeline.registry.registry import Candidate, MemoryRegistry  # noqa: E402
from draftloop.pipeline.rollout.agent import Agent, AgentConfig  # noqa: E402
from draftloop.pipeline.rollout.canary import CanaryConfig  # noqa: E402
from draftloop.serving_hooks.embedded.engine import EmbeddedEngine, EngineConfig, Request  # noqa: E402

Prompts = list[tuple[int, ...]]


@pytest.fixture
def engine(tiny_target: Any) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(tiny_target, EngineConfig(max_sequence=160, max_batch=8, floor="none")) as engine:
        yield engine


@pytest.fixture
def registry() -> MemoryRegistry:
    return MemoryRegistry()


@pytest.fixture
def agent(engine: EmbeddedEngine, registry: MemoryRegistry, prompts: Prompts, tmp_path: Path) -> Agent:
    return Agent(
        engine,
        registry,
        tmp_path / "agent",
        check_verdict=lambda document, digest, fingerprint: None,
        canary_prompts=prompts,
        config=AgentConfig(tie_margin=0.0, canary=CanaryConfig(settle_steps=0, watch_steps=50)),
    )


def promote(registry: MemoryRegistry, folder: Path) -> str:
    digest = (folder / MARKER).read_text()
    candidate = Candidate(digest[:8], folder, digest, {"digest": digest}, "", {}, {}, {}, (), {}, {}, "s", {})
    return registry.promote(registry.register(candidate).version, by="ann", reason="gains").version


def serve(engine: EmbeddedEngine, prompts: Prompts, label: str) -> list[tuple[int, ...]]:
    requests = [Request(f"{label}-{number}", prompt, Sampling(max_tokens=40)) for number, prompt in enumerate(prompts)]
    return [done.output_ids for done in engine.generate(requests)]


def test_a_good_drafter_goes_live_and_a_broken_one_is_taken_back_without_a_changed_token(
    engine: EmbeddedEngine,
    registry: MemoryRegistry,
    agent: Agent,
    prompts: Prompts,
    trained_drafter: Any,
    make_drafter: Callable[..., Any],
    publish: Callable[..., Path],
) -> None:
    plain = serve(engine, prompts, "plain")
    promote(registry, publish("good", trained_drafter))
    running = engine.submit(Request("running", prompts[0], Sampling(max_tokens=100)))
    outcome = agent.reconcile()
    assert (outcome.state, outcome.version, outcome.outputs_identical) == ("WATCHING", "1", True)
    assert running.result(timeout=60).output_ids[:40] == plain[0][:40]
    assert serve(engine, prompts, "good") == plain
    while agent.reconcile().state == "WATCHING":
        serve(engine, prompts, "more")
    assert agent.reconcile().state == "LIVE"

    broken = make_drafter(seed=5, draft_vocab_size=131)
    never = min(set(range(131)) - {token for output in plain for token in output})
    broken.lm_head.weight.data.zero_()  # always proposes its first token,
    broken.d2t[0], broken.d2t[never] = never, -never  # which the target never says
    promote(registry, publish("broken", broken))
    outcome = agent.reconcile()
    assert (outcome.state, outcome.version, outcome.outputs_identical) == ("ROLLED_BACK", "1", True)
    assert "no proposal was accepted" in outcome.reason
    assert engine.drafter_version() == "1"
    assert serve(engine, prompts, "after") == plain


def test_a_drafter_of_another_shape_leaves_the_live_one(
    engine: EmbeddedEngine,
    registry: MemoryRegistry,
    agent: Agent,
    trained_drafter: Any,
    make_drafter: Callable[..., Any],
    publish: Callable[..., Path],
) -> None:
    promote(registry, publish("good", trained_drafter))
    agent.reconcile()
    promote(registry, publish("other", make_drafter(seed=6, draft_vocab_size=30)))
    outcome = agent.reconcile()
    assert (outcome.state, engine.drafter_version()) == ("WATCHING", "1")  # nothing was touched: the watch goes on
    assert "has another shape than the live one (draft_vocab_size 131 -> 30)" in outcome.reason

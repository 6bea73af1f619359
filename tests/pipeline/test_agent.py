"""The agent against each way in which a swap can go wrong, on the in-memory engine and registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import (
    ConfigError,
    LeaseHeldError,
    RegistryError,
    SwapFailedError,
    SwapRefusedError,
)
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.lease import lease
from draftloop.pipeline.losslessness import Divergence
from draftloop.pipeline.records import ProbeResult, SpecCounters, Swapped
from draftloop.pipeline.registry.registry import Candidate, MemoryRegistry, Version
from draftloop.pipeline.rollout.agent import Agent, AgentConfig
from draftloop.pipeline.rollout.canary import CanaryConfig
from draftloop.pipeline.rollout.engine_client import FakeEngine
from draftloop.pipeline.rollout.journal import Journal

TARGET = Fingerprint(
    weights_digest="w",
    tokenizer_digest="t",
    template_digest="c",
    vocab_size=131,
    padded_vocab_size=136,
    hidden_size=32,
    num_layers=4,
    tap_layers=(1, 2, 3),
    dtype="float32",
    quantization="none",
    max_position_embeddings=512,
    rope_theta=10000.0,
)
PROMPTS = ((1, 2), (3,))
CONFIG = AgentConfig(canary=CanaryConfig(settle_steps=0))


class Killed(BaseException):
    """The process dies here: nothing of ours may catch it."""


@dataclass
class KillableEngine(FakeEngine):
    """Dies once where it is told to, and reads files as an engine does."""

    die_at: str | None = None
    forgetful: bool = False  # a swap that fails leaves it without a drafter
    outputs_of: dict[str | None, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def _maybe_die(self, at: str) -> None:
        if self.die_at == at:
            self.die_at = None
            raise Killed(at)

    def swap(self, folder: Path | None, version: str | None) -> Swapped:
        self._maybe_die("swap")
        if folder is not None:
            artifact.verify(folder, kind="drafter", error=SwapFailedError)  # as an engine's own loader does
        if self.forgetful and version in self.fail_loading:
            self.version = None
        swapped = super().swap(folder, version)
        self._maybe_die(f"swapped {version}")
        return swapped

    def probe(self, prompts: Any, max_tokens: int) -> ProbeResult:
        self._maybe_die(f"probe {self.version}")
        found = super().probe(prompts, max_tokens)
        outputs = self.outputs_of.get(self.version, self.outputs)
        return ProbeResult(outputs, found.margins, found.counters)


@dataclass(frozen=True)
class Compared:
    divergences: tuple[Divergence, ...]
    lossless: bool


def compare(before: ProbeResult, after: ProbeResult, tie_margin: float) -> Compared:
    same = before.output_ids == after.output_ids
    return Compared(() if same else (Divergence(0, 0, 9.0, False),), same)


def check_verdict(document: dict[str, Any], digest: str, fingerprint: str) -> None:
    if document.get("signature") != "good":
        raise SwapRefusedError("verdict is unsigned")
    if (document["digest"], document["fingerprint"]) != (digest, fingerprint):
        raise SwapRefusedError("verdict is for something else")


class Stage:
    """An engine that drafts with nothing, a registry, and drafters promoted into it by number."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.engine = KillableEngine(TARGET, tau_of={None: 1.0})
        self.registry = MemoryRegistry()
        self.agent = self.start()

    def start(self, registry: MemoryRegistry | None = None, config: AgentConfig = CONFIG) -> Agent:
        return Agent(
            self.engine,
            registry or self.registry,
            self.tmp_path / "agent",
            check_verdict=check_verdict,
            canary_prompts=PROMPTS,
            config=config,
            compare=compare,
        )

    def promote(
        self, tau: float, *, promised: float | None = None, target: Fingerprint = TARGET, **verdict: Any
    ) -> str:
        number = len(self.registry.champions()) + 1
        final = self.tmp_path / "made" / str(number)
        with artifact.staging(final) as draft:
            (draft / "model.safetensors").write_bytes(bytes([number]))
            manifest = {"fingerprint": target.to_dict(), "tensor_digest": f"tensors-{number}"}
            artifact.publish(draft, final, manifest)
        digest = (final / artifact.MARKER).read_text()
        evidence = {
            "challenger_tau": promised or tau,
            "comparison": {"ratio": 1.25, "low": 1.2, "high": 1.3},
            "k": 4,
        }
        document = {
            "digest": digest,
            "fingerprint": target.digest,
            "decision": "passed",
            "signature": "good",
            "evidence": evidence,
        }
        candidate = Candidate(f"job{number}", final, digest, document | verdict, "", {}, {}, {}, (), {}, {}, "s", {})
        version = self.registry.promote(self.registry.register(candidate).version, by="ann", reason="gains").version
        self.engine.tau_of[version] = tau
        self.engine.digest_of[version] = f"tensors-{number}"
        return version

    def settle_on(self, tau: float) -> str:
        """A champion that went live and served enough for its level to be known."""
        version = self.promote(tau)
        assert self.agent.reconcile().state == "WATCHING"
        self.engine.serve(num_steps=5000)
        assert self.agent.reconcile().state == "LIVE"
        self.engine.serve(num_steps=5000)
        return version

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.tmp_path / "agent" / "audit.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def states(self) -> list[str]:
        return [event["state"] for event in self.events("state")]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_new_champion_goes_live_in_six_steps(stage: Stage) -> None:
    stage.promote(2.0)
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version, outcome.outputs_identical) == ("WATCHING", "1", True)
    assert outcome.swap_ms is not None
    assert stage.engine.calls == ["probe", "swap 1", "probe"]
    stage.engine.serve(num_steps=5000)
    assert stage.agent.reconcile().decision == "PASS"
    assert stage.states() == ["VERIFYING", "STAGED", "SWAPPING", "PROBING", "WATCHING", "LIVE"]


def test_without_a_champion_what_is_live_stays(stage: Stage) -> None:
    stage.engine.version = "by hand"
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version) == ("LIVE", "by hand")
    assert stage.engine.calls == []


def test_an_unchanged_champion_is_not_loaded_again(stage: Stage) -> None:
    stage.settle_on(2.0)
    before = list(stage.engine.calls)
    assert stage.agent.reconcile().reason == "the champion is live"
    assert stage.engine.calls == before


def test_an_engine_that_restarted_gets_the_champion_back(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.engine.version, stage.engine._counters = None, SpecCounters()
    assert stage.agent.reconcile().version == "1"
    assert stage.engine.version == "1"


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ({"signature": None}, "unsigned"),
        ({"digest": "0" * 64}, "something else"),
        ({"fingerprint": "0" * 16}, "something else"),
    ],
)
def test_a_verdict_that_does_not_fit_is_refused_before_the_engine_is_touched(
    stage: Stage, verdict: dict[str, Any], reason: str
) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5, **verdict)
    before = list(stage.engine.calls)
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version) == ("LIVE", "1")
    assert reason in outcome.reason
    assert stage.engine.calls == before


def test_a_drafter_of_another_target_is_refused(stage: Stage) -> None:
    other = replace(TARGET, weights_digest="other")
    stage.promote(2.0, target=other, fingerprint=TARGET.digest)
    outcome = stage.agent.reconcile()
    assert outcome.version is None
    assert "weights_digest: the engine has 'w', version 1 has 'other'" in outcome.reason
    assert stage.engine.calls == []


def test_a_refused_version_is_not_tried_again_until_the_alias_moves(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5, signature=None)
    stage.agent.reconcile()
    assert "stays refused: verdict is unsigned" in stage.agent.reconcile().reason
    assert len(stage.events("refused")) == 1
    stage.registry.set_champion("1", by="ann", reason="look")
    stage.agent.reconcile()
    stage.registry.set_champion("2", by="ann", reason="again")
    stage.agent.reconcile()
    assert len(stage.events("refused")) == 2


def test_a_file_altered_in_the_registry_is_refused(stage: Stage) -> None:
    stage.promote(2.0)
    (stage.tmp_path / "made" / "1" / "model.safetensors").write_bytes(b"evil")
    assert "model.safetensors was altered" in stage.agent.reconcile().reason
    assert stage.engine.calls == []


class MeddlingRegistry(MemoryRegistry):
    """Somebody acts between the agent's check and its load: at the second look at the alias."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        super().__init__()
        self._meddle = meddle
        self._looks = 0

    def champion(self) -> Version | None:
        self._looks += 1
        if self._looks == 2:
            self._meddle()
        return super().champion()


def test_a_file_altered_between_check_and_load_is_refused(stage: Stage) -> None:
    altered = stage.tmp_path / "agent" / "drafters" / "1" / "model.safetensors"
    stage.registry = MeddlingRegistry(lambda: altered.write_bytes(b"evil") and None)
    stage.agent = stage.start()
    stage.promote(2.0)
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version) == ("IDLE", None)
    assert "model.safetensors was altered" in outcome.reason
    assert stage.engine.calls == ["probe"]


def test_an_alias_that_moves_while_a_version_is_staged_stops_the_swap(stage: Stage) -> None:
    stage.registry = MeddlingRegistry(lambda: setattr(stage.registry, "_alias", "1"))
    stage.promote(2.0)
    stage.promote(2.5)
    stage.agent = stage.start()
    assert stage.agent.reconcile().reason == "the alias moved while version 2 was staged"
    assert stage.engine.calls == ["probe"]
    assert stage.agent.reconcile().version == "1"


def test_a_file_altered_at_the_last_moment_is_caught_by_the_loaded_tensors(stage: Stage) -> None:
    stage.settle_on(2.0)
    version = stage.promote(2.5)
    stage.engine.digest_of[version] = "other tensors"
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version) == ("ROLLED_BACK", "1")
    assert "the engine loaded tensors other tensor" in outcome.reason


@pytest.mark.parametrize(
    ("forgetful", "calls"), [(False, ["probe", "swap 2", "probe"]), (True, ["probe", "swap 2", "swap 1", "probe"])]
)
def test_a_load_that_fails_leaves_the_previous_drafter_proven_loaded_back_if_need_be(
    stage: Stage, forgetful: bool, calls: list[str]
) -> None:
    stage.settle_on(2.0)
    stage.engine.forgetful = forgetful
    stage.engine.fail_loading = {"2"}
    stage.promote(2.5)
    stage.engine.calls.clear()
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version, outcome.outputs_identical) == ("ROLLED_BACK", "1", True)
    assert stage.engine.calls == calls
    assert "stays refused: cannot load 2" in stage.agent.reconcile().reason


def test_if_the_previous_drafter_fails_too_the_engine_serves_without_one(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5)
    stage.engine.fail_loading, stage.engine.forgetful = {"1", "2"}, True
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version) == ("ROLLED_BACK", None)
    assert [event["version"] for event in stage.events("previous-failed")] == ["1"]


def test_if_nothing_loads_the_agent_says_so_and_tries_again(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5)
    stage.engine.fail_loading, stage.engine.forgetful = {None, "1", "2"}, True
    with pytest.raises(SwapFailedError, match="cannot load None"):
        stage.agent.reconcile()
    stage.engine.fail_loading = {"2"}
    assert stage.agent.reconcile().version == "1"


def test_outputs_that_change_with_the_swap_take_it_back(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.engine.outputs_of["2"] = ((9, 9, 9),)
    stage.promote(2.5)
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version) == ("ROLLED_BACK", "1")
    assert outcome.reason == "the target's greedy outputs for the canary prompts changed with the swap"


def test_outputs_that_differ_within_ties_are_let_through_and_told(stage: Stage) -> None:
    stage.promote(2.0)
    agent = Agent(
        stage.engine,
        stage.registry,
        stage.tmp_path / "agent",
        check_verdict=check_verdict,
        canary_prompts=PROMPTS,
        config=CONFIG,
        compare=lambda before, after, tie_margin: Compared((Divergence(0, 3, 0.1, True),), tie_margin == 0.5),
    )
    outcome = agent.reconcile()
    assert (outcome.state, outcome.outputs_identical) == ("WATCHING", False)
    assert outcome.near_ties == (Divergence(0, 3, 0.1, True),)


@pytest.mark.parametrize(("tau", "reason"), [(1.0, "no proposal was accepted"), (5.0, "all 400 proposals")])
def test_a_probe_that_accepts_nothing_or_everything_takes_the_swap_back(stage: Stage, tau: float, reason: str) -> None:
    stage.settle_on(2.0)
    stage.promote(tau)
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version) == ("ROLLED_BACK", "1")
    assert reason in outcome.reason


def test_a_collapse_in_production_takes_the_drafter_and_the_alias_back(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5)
    assert stage.agent.reconcile().state == "WATCHING"
    stage.engine.tau_of["2"] = 1.1
    stage.engine.serve(num_steps=1000)
    outcome = stage.agent.reconcile()
    assert (outcome.state, outcome.version, outcome.decision) == ("ROLLED_BACK", "1", "ROLL_BACK")
    assert "is below the promised 2.50" in outcome.reason
    live = stage.registry.champion()
    assert live is not None
    assert live.version == "1"
    assert stage.registry.decisions[-1] == ("1", "agent", outcome.reason)
    assert stage.agent.reconcile().state == "ROLLED_BACK"
    assert stage.engine.version == "1"


def test_nothing_accepted_right_after_the_swap_trips_at_once(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5)
    stage.agent.reconcile()
    stage.engine.tau_of["2"] = 1.0
    stage.engine.serve(num_steps=100)
    assert "next to no proposal is accepted" in stage.agent.reconcile().reason
    assert stage.engine.version == "1"


def test_an_alias_moved_by_a_person_meanwhile_is_left_alone(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5)
    stage.agent.reconcile()
    stage.engine.tau_of["2"] = 1.1
    stage.engine.serve(num_steps=1000)
    stage.engine.die_at = "swapped 1"
    with pytest.raises(Killed):
        stage.agent.reconcile()
    third = stage.promote(2.2)
    assert stage.start().reconcile().version == third
    live = stage.registry.champion()
    assert live is not None
    assert live.version == third


class DeafRegistry(MemoryRegistry):
    """Cannot be written to by the agent until told so."""

    deaf = True

    def set_champion(self, version: str, *, by: str, reason: str) -> Version:
        if self.deaf and by == "agent":
            raise RegistryError("no rights")
        return super().set_champion(version, by=by, reason=reason)


def test_an_alias_that_cannot_be_moved_is_moved_at_a_later_pass(stage: Stage) -> None:
    stage.registry = DeafRegistry()
    stage.agent = stage.start()
    stage.settle_on(2.0)
    stage.promote(2.5)
    stage.agent.reconcile()
    stage.engine.tau_of["2"] = 1.1
    stage.engine.serve(num_steps=1000)
    assert stage.agent.reconcile().version == "1"
    assert stage.agent.reconcile().version == "1"
    stage.registry.deaf = False
    stage.agent.reconcile()
    assert [event["to"] for event in stage.events("alias-moved")] == ["1"]


@pytest.mark.parametrize(
    ("die_at", "state"),
    [("probe 1", "STAGED"), ("swap", "SWAPPING"), ("swapped 2", "SWAPPING"), ("probe 2", "PROBING")],
)
def test_an_agent_killed_on_the_way_starts_from_what_is_known_and_arrives(
    stage: Stage, die_at: str, state: str
) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5)
    stage.engine.die_at = die_at
    with pytest.raises(Killed):
        stage.agent.reconcile()
    memory = Journal(stage.tmp_path / "agent").read()
    assert memory.state == state
    stage.engine.calls.clear()
    outcome = stage.start().reconcile()
    assert (outcome.state, outcome.version) == ("WATCHING", "2")
    told = [event["reason"] for event in stage.events("state") if event["reason"].startswith("killed while")]
    assert told[-1].startswith(f"killed while {state} version 2")
    assert ("swap 1" in stage.engine.calls) == (die_at in ("swapped 2", "probe 2"))


def test_a_version_that_kills_the_agent_twice_is_refused(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5)
    for _ in range(2):
        stage.engine.die_at = "swapped 2"
        with pytest.raises(Killed):
            stage.agent.reconcile()
    outcome = stage.agent.reconcile()
    assert (outcome.version, outcome.state) == ("1", "ROLLED_BACK")
    assert "time 2" in outcome.reason


def test_an_agent_killed_while_watching_goes_on_watching(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5)
    stage.agent.reconcile()
    stage.engine.serve(num_steps=5000)
    assert stage.start().reconcile().decision == "PASS"


def test_an_agent_killed_while_taking_back_finishes_it(stage: Stage) -> None:
    stage.settle_on(2.0)
    stage.promote(2.5)
    stage.agent.reconcile()
    stage.engine.tau_of["2"] = 1.1
    stage.engine.serve(num_steps=1000)
    stage.engine.die_at = "swap"
    with pytest.raises(Killed):
        stage.agent.reconcile()
    assert stage.start().reconcile().version == "1"
    live = stage.registry.champion()
    assert live is not None
    assert live.version == "1"


def test_only_one_agent_holds_an_engine(stage: Stage) -> None:
    stage.promote(2.0)
    with (
        lease(stage.tmp_path / "agent" / "agent.lock", what="agent"),
        pytest.raises(LeaseHeldError, match="another agent"),
    ):
        stage.agent.reconcile()
    assert stage.engine.calls == []


def test_staging_keeps_the_live_the_previous_and_the_newest(stage: Stage) -> None:
    for number in range(1, 6):
        assert stage.settle_on(2.0 + number / 100) == str(number)
    kept = sorted(path.name for path in (stage.tmp_path / "agent" / "drafters").iterdir())
    assert kept == ["3", "4", "5"]


def test_what_a_killed_agent_left_half_fetched_is_removed(stage: Stage) -> None:
    left = [stage.tmp_path / "agent" / "drafters" / ".1.abcd_123", stage.tmp_path / "agent" / ".state.json.4711"]
    left[0].mkdir(parents=True)
    left[1].write_text("{")
    stage.agent.reconcile()
    assert not any(path.exists() for path in left)


def test_the_audit_holds_no_content(stage: Stage) -> None:
    stage.engine.outputs = ((4711, 4712),)
    stage.settle_on(2.0)
    text = (stage.tmp_path / "agent" / "audit.jsonl").read_text()
    assert "4711" not in text
    assert all(set(json.loads(line)) >= {"time", "event", "reason"} for line in text.splitlines())


def test_an_agent_without_canary_prompts_does_not_start(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="no canary prompts"):
        Agent(
            stage.engine,
            stage.registry,
            stage.tmp_path,
            check_verdict=check_verdict,
            canary_prompts=(),
            compare=compare,
        )


def test_metrics_name_the_served_version_and_count_swaps(stage: Stage) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    path = stage.tmp_path / "metrics" / "draftloop.prom"
    stage.agent = stage.start(config=AgentConfig(canary=CONFIG.canary, metrics_file=path))
    stage.settle_on(2.0)
    stage.promote(1.0)
    stage.agent.reconcile()
    stage.agent.reconcile()
    found = {
        (sample.name, sample.labels.get("result", sample.labels.get("version"))): sample.value
        for family in parser.text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }
    assert found["draftloop_drafter_version_info", "1"] == 1
    assert found["draftloop_swaps_total", "swapped"] == 1
    assert found["draftloop_swaps_total", "live"] == 1
    assert found["draftloop_swaps_total", "failed"] == 1
    assert ("draftloop_tau_since_swap", None) in found

"""The agent of an engine that outlives it, or does not: verdicts, the live link, restarts, lost replicas, samples."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from admin_twin import AdminTwin, serving
from samples import FINGERPRINT as TARGET

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import (
    AdminDeniedError,
    DraftloopError,
    EngineUnreachableError,
    ReplicaLostError,
    SwapBusyError,
    SwapFailedError,
    SwapRefusedError,
)
from draftloop.pipeline.records import Condition, ProbeResult, SpecCounters, Swapped
from draftloop.pipeline.registry.registry import Candidate, MemoryRegistry
from draftloop.pipeline.rollout.agent import Agent, AgentConfig
from draftloop.pipeline.rollout.canary import CanaryConfig
from draftloop.pipeline.rollout.engine_client import FakeEngine, Generated, Scores
from draftloop.pipeline.rollout.journal import Journal
from draftloop.pipeline.rollout.vllm_client import VllmClient
from draftloop.pipeline.stream.audit import MemoryAudit

PROMPTS = [(number,) for number in range(12)]
CONFIG = AgentConfig(canary=CanaryConfig(settle_steps=0))
WORDS = 8


class Killed(BaseException):
    """The process dies here: nothing of ours may catch it."""


@dataclass
class LiveEngine(FakeEngine):
    """As vLLM is: reads from staging, cannot serve without a drafter, boots with what `live` names, samples texts."""

    folder: Path = Path()
    digest: str = ""
    raises: dict[str | None, list[Exception]] = field(default_factory=dict)  # version -> what its next swaps raise
    noise: bool = False  # speculated sampling is noise, whatever drafts
    noisy_versions: set[str | None] = field(default_factory=set)
    deaf_to_sampling: bool = False
    asked: list[str] = field(default_factory=list)
    die_at: str | None = None
    away: bool = False

    def boot(self, boot_id: str) -> None:
        """A new process: what `live` names, counters from nothing."""
        live = Journal(self.folder).live
        self.version, self.digest = live.resolve().name, (live / artifact.MARKER).read_text()
        self.boot_id, self.restart_needed, self._counters = boot_id, None, SpecCounters()

    def condition(self) -> Condition:
        if self.away:
            raise EngineUnreachableError("nothing answers")
        tensors = self.digest_of.get(self.version, "")
        return Condition(self.boot_id, self.version, self.digest, tensors, self.restart_needed)

    def swap(self, folder: Path | None, version: str | None) -> Swapped:
        self._die("swap")
        if folder is None:
            raise SwapRefusedError("vLLM cannot serve without the drafter it was started with")
        staged = self.folder / "drafters" / str(version)
        if version != "boot" and not (self.folder / "verdicts" / f"{version}.json").is_file():
            raise SwapRefusedError(f"version {version} has no verdict")
        if self.raises.get(version):
            error = self.raises[version].pop(0)
            if isinstance(error, ReplicaLostError):
                self.restart_needed, self.version, self.digest = error.message, None, ""
            raise error
        swapped = super().swap(staged, version)
        self.digest = (staged / artifact.MARKER).read_text()
        self._die("swapped")
        return swapped

    def probe(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> ProbeResult:
        self._die(f"probe {self.version}")
        return super().probe(prompts, max_tokens)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        speculate: bool = True,
    ) -> Generated:
        self.asked.append(f"{'greedy' if not temperature else 'sampled'} {'with' if speculate else 'without'}")
        if temperature and self.deaf_to_sampling:
            raise SwapFailedError("HTTP 500")
        noise = temperature and speculate and (self.noise or self.version in self.noisy_versions)
        seed = len(self.asked) if seed is None else seed
        outputs = tuple(
            tuple((seed + 7 * number + 3 * place) % WORDS if noise else (seed + number + place) % 2
                  for place in range(max_tokens))
            for number in range(len(prompts))
        )  # fmt: skip
        if not temperature:
            outputs = tuple((0,) * max_tokens for _ in prompts)
        return Generated(outputs, tuple((9.0,) * max_tokens for _ in prompts), SpecCounters())

    def score(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Scores:
        logs = [-math.log(2) if word < 2 else -6.0 for word in range(WORDS)]
        return Scores(
            tuple(tuple(logs[token] for token in output) for output in outputs),
            tuple(tuple(token + 1 for token in output) for output in outputs),
            tuple(tuple(0.0 for _ in output) for output in outputs),
        )

    def _die(self, at: str) -> None:
        if self.die_at == at:
            self.die_at = None
            raise Killed(at)


def check_verdict(document: dict[str, Any], digest: str, fingerprint: str) -> None:
    if document.get("signature") != "good" or document["digest"] != digest:
        raise SwapRefusedError("verdict is unsigned")


class Site:
    """One replica that booted with the drafter `boot`, its agent, and a registry."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "agent"
        self.journal = Journal(self.folder)
        self.registry = MemoryRegistry()
        self.made = tmp_path / "made"
        self.audit = MemoryAudit()
        self.engine = LiveEngine(TARGET, folder=self.folder, tau_of={"boot": 1.2}, digest_of={"boot": "tensors-boot"})
        self.publish(self.folder / "drafters" / "boot", "boot")
        self.journal.point_live("boot")
        self.engine.boot("first")
        self.agent = self.start()

    def start(self, **settings: Any) -> Agent:
        return Agent(
            self.engine,
            self.registry,
            self.folder,
            check_verdict=check_verdict,
            canary_prompts=PROMPTS,
            config=CONFIG.model_copy(update=settings),
            audit=self.audit,
        )

    def publish(self, final: Path, name: str) -> str:
        with artifact.staging(final) as draft:
            (draft / "model.safetensors").write_bytes(name.encode())
            artifact.publish(draft, final, {"fingerprint": TARGET.to_dict(), "tensor_digest": f"tensors-{name}"})
        return (final / artifact.MARKER).read_text()

    def promote(self, tau: float = 2.0) -> str:
        number = str(len(self.registry.champions()) + 1)
        digest = self.publish(self.made / number, number)
        evidence = {"challenger_tau": tau, "comparison": {"ratio": 1.25, "low": 1.2, "high": 1.3}, "k": 4}
        document = {"digest": digest, "decision": "passed", "signature": "good", "evidence": evidence}
        candidate = Candidate(f"job{number}", self.made / number, digest, document, "", {}, {}, {}, (), {}, {}, "s", {})
        version = self.registry.promote(self.registry.register(candidate).version, by="ann", reason="gains").version
        self.engine.tau_of[version], self.engine.digest_of[version] = tau, f"tensors-{version}"
        return version

    def settle(self) -> str:
        """A champion that went live and was watched to the end."""
        version = self.promote()
        assert self.agent.reconcile().state == "WATCHING"
        self.engine.serve(num_steps=5000)
        assert self.agent.reconcile().state == "LIVE"
        return version

    @property
    def alias(self) -> str | None:
        found = self.registry.champion()
        return found and found.version

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / "audit.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


# What the engine needs at hand.


def test_a_swap_leaves_the_verdict_beside_the_drafter_and_moves_the_live_link(site: Site) -> None:
    site.promote()
    assert site.agent.reconcile().state == "WATCHING"
    verdict = json.loads((site.folder / "verdicts" / "1.json").read_text())
    assert verdict == site.registry.verdict("1")
    assert site.journal.live.resolve() == (site.folder / "drafters" / "1").resolve()
    assert site.journal.live.readlink() == Path("drafters/1")


def test_a_refused_version_moves_nothing(site: Site) -> None:
    version = site.promote()
    site.engine.raises[version] = [SwapRefusedError("tensor fc.weight has another shape")]
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version) == ("IDLE", "boot")
    assert outcome.reason == "tensor fc.weight has another shape"
    assert site.journal.live_version() == "boot"
    assert site.engine.calls == ["probe"]
    assert "stays refused" in site.agent.reconcile().reason


def test_a_drafter_taken_back_takes_the_link_back_to_the_drafter_of_the_first_start(site: Site) -> None:
    site.promote()
    site.agent.reconcile()
    site.engine.tau_of["1"] = 1.0
    site.engine.serve(num_steps=1000)
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version) == ("ROLLED_BACK", "boot")
    assert site.journal.live_version() == "boot"
    assert site.alias == "1"  # no registry knows `boot`: the alias stays, and the version stays refused
    assert "stays refused" in site.agent.reconcile().reason


def test_the_boot_drafter_and_what_is_live_are_never_pruned(site: Site) -> None:
    for _ in range(5):
        site.settle()
    assert sorted(path.name for path in (site.folder / "drafters").iterdir()) == ["3", "4", "5", "boot"]
    assert sorted(path.stem for path in (site.folder / "verdicts").iterdir()) == ["3", "4", "5"]


def test_a_swap_that_the_engine_undid_is_proven_without_another_pause(site: Site) -> None:
    version = site.promote()
    site.engine.raises[version] = [SwapFailedError("tensor norm.weight is not what was loaded; boot serves again")]
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version, outcome.swap_ms) == ("ROLLED_BACK", "boot", None)
    assert site.engine.calls == ["probe", "probe"]


@pytest.mark.parametrize("error", [SwapBusyError("busy"), AdminDeniedError("token"), EngineUnreachableError("gone")])
def test_what_says_nothing_about_the_drafter_is_tried_again(site: Site, error: DraftloopError) -> None:
    version = site.promote()
    site.engine.raises[version] = [error]
    with pytest.raises(type(error)):
        site.agent.reconcile()
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version) == ("WATCHING", "1")


# Kills.


def kill_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool], *, after: bool
) -> None:
    """The process dies before or after the first such call."""
    original, armed = getattr(owner, name), [True]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if armed[0] and when(*args):
            armed[0] = False
            if after:
                original(*args, **kwargs)
            raise Killed(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def at_verdict(path: Path, value: object) -> bool:
    return path.parent.name == "verdicts"


def at_link_to_the_second(journal: Journal, version: str | None) -> bool:
    return version == "2" and journal.live_version() != "2"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "when", "state"),
    [
        (artifact, "write_json", at_verdict, "VERIFYING"),
        (LiveEngine, "swap", lambda engine, folder, version: version == "2", "SWAPPING"),
        (Journal, "point_live", at_link_to_the_second, "WATCHING"),
        (Journal, "prune", lambda journal, keep, number: "2" in keep, "WATCHING"),
    ],
)
def test_an_agent_killed_at_any_new_step_arrives_at_a_known_state(
    site: Site, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Any, state: str, after: bool
) -> None:
    site.settle()
    site.promote(2.2)
    kill_once(monkeypatch, owner, name, when, after=after)
    with pytest.raises(Killed):
        site.agent.reconcile()
    assert site.journal.read().state == state
    outcome = site.start().reconcile()
    assert (outcome.state, outcome.version) == ("WATCHING", "2")
    assert (site.engine.version, site.journal.live_version()) == ("2", "2")


@pytest.mark.parametrize("die_at", ["swap", "swapped", "probe 2", "probe 1"])
def test_an_engine_that_restarts_while_the_agent_is_dead_is_met_where_it_is(site: Site, die_at: str) -> None:
    site.settle()
    site.promote(2.2)
    site.engine.die_at = die_at
    with pytest.raises(Killed):
        site.agent.reconcile()
    site.engine.boot("second")
    assert site.engine.version == "1"  # never with what was not proven
    outcome = site.start().reconcile()
    assert (outcome.state, outcome.version, site.journal.live_version()) == ("WATCHING", "2", "2")


def test_an_engine_that_restarts_while_a_drafter_is_taken_back_boots_with_the_one_before(site: Site) -> None:
    site.settle()
    site.promote(2.2)
    site.agent.reconcile()
    site.engine.tau_of["2"] = 1.0
    site.engine.serve(num_steps=1000)
    site.engine.die_at = "swap"
    with pytest.raises(Killed):
        site.agent.reconcile()
    assert (site.engine.version, site.journal.live_version()) == ("2", "1")
    site.engine.boot("second")
    site.engine.calls.clear()
    outcome = site.start().reconcile()
    assert (site.engine.version, outcome.state, site.alias) == ("1", "ROLLED_BACK", "1")
    assert site.engine.calls == ["probe"]


def test_a_live_link_that_somebody_moved_is_mended(site: Site) -> None:
    site.settle()
    site.journal.point_live("boot")
    assert site.agent.reconcile().state == "LIVE"
    assert site.journal.live_version() == "1"
    assert [(event["from"], event["to"]) for event in site.events("live-link-mended")] == [("boot", "1")]


# Swaps that end when nobody waits for them any more.


@dataclass
class RemoteEngine(LiveEngine):
    """Its greedy probes leave counters, as those behind the admin route do."""

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, **sampling: Any) -> Generated:
        self.calls.append(f"probe {self.version}")
        found = super().generate(prompts, max_tokens=max_tokens, **sampling)
        return Generated(found.output_ids, found.margins, self.serve(num_steps=100))


class RemoteSite(Site):
    """The same replica over HTTP; version 1 is live, version 2 was promoted."""

    def __init__(self, tmp_path: Path, twin: AdminTwin, token: Path) -> None:
        super().__init__(tmp_path)
        local = self.engine
        self.engine = twin.engine = RemoteEngine(
            TARGET, folder=self.folder, tau_of=local.tau_of, digest_of=local.digest_of
        )
        self.engine.boot("first")
        self.twin, self.token = twin, token
        twin.staging, twin.digest = self.folder / "drafters", self.engine.digest
        self.agent = self.start()
        self.settle()
        self.promote(2.2)
        self.engine.calls.clear()

    def start(self, **settings: Any) -> Agent:
        if not hasattr(self, "twin"):
            return super().start(**settings)
        return Agent(
            VllmClient(self.twin.url, self.token, timeout_s=5, swap_timeout_s=settings.pop("swap_timeout_s", 5)),
            self.registry,
            self.folder,
            check_verdict=check_verdict,
            canary_prompts=PROMPTS,
            config=CONFIG.model_copy(update={"sampling_check": "off", **settings}),
        )


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteSite]:
    token = tmp_path / "admin.token"
    token.write_text("secret")
    with serving(AdminTwin(FakeEngine(TARGET))) as twin:
        yield RemoteSite(tmp_path, twin, token)


TAKEN_BACK_AND_PROVEN = ["swap 2", "swap 1", "probe 1", "probe 1", "swap 2", "probe 2"]


def killed_in_the_swap(remote: RemoteSite, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The engine has the request and the agent is dead."""

    def outcome(*args: Any) -> None:
        raise Killed("waiting")

    remote.twin.swap_fault = fault
    with monkeypatch.context() as patch:
        patch.setattr(VllmClient, "_outcome", outcome)
        with pytest.raises(Killed):
            remote.agent.reconcile()
    assert remote.journal.read().state == "SWAPPING"
    remote.engine.calls.clear()


def test_a_restarted_agent_lets_the_swap_end_and_then_proves_what_it_brought(
    remote: RemoteSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_in_the_swap(remote, monkeypatch, "begin")
    timer = threading.Timer(0.3, remote.twin.finish)
    timer.start()
    outcome = remote.start().reconcile()
    timer.join()
    assert (outcome.state, outcome.version) == ("WATCHING", "2")
    assert remote.engine.calls == TAKEN_BACK_AND_PROVEN
    assert remote.journal.read().previous.version == "1"


def test_a_restarted_agent_decides_nothing_while_the_swap_does_not_end(
    remote: RemoteSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_in_the_swap(remote, monkeypatch, "begin")
    before = remote.journal.read()
    with pytest.raises(SwapBusyError):
        remote.start(swap_timeout_s=0.1).reconcile()
    assert remote.journal.read() == before
    remote.twin.finish()
    outcome = remote.start().reconcile()
    assert (outcome.state, outcome.version) == ("WATCHING", "2")
    assert remote.engine.calls == TAKEN_BACK_AND_PROVEN


@pytest.mark.parametrize("name", ["_follow", "_look", "_roll_out", "_previous"])
def test_a_swap_that_begins_only_after_the_agent_came_back_is_taken_back_and_proven(
    remote: RemoteSite, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    killed_in_the_swap(remote, monkeypatch, "queue")
    original = getattr(Agent, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        if remote.twin.pending is not None:
            remote.twin.finish()
        return original(*args, **kwargs)

    monkeypatch.setattr(Agent, name, late)
    if name == "_look":
        remote.registry.set_champion("1", by="ann", reason="look")
    agent = remote.start()
    outcome = agent.reconcile()
    assert (outcome.state, outcome.reason) == ("ROLLED_BACK", "the swap to version 2 ended late")
    assert (remote.engine.version, remote.journal.live_version()) == ("2", "1")
    remote.engine.calls.clear()
    if name == "_look":
        assert (agent.reconcile().version, remote.engine.calls) == ("1", ["swap 1", "probe 1"])
        return
    outcome = agent.reconcile()
    assert (outcome.state, outcome.version) == ("WATCHING", "2")
    assert remote.engine.calls == TAKEN_BACK_AND_PROVEN[1:]
    memory = remote.journal.read()
    assert (memory.previous.version, memory.refused) == ("1", {})


def test_an_agent_that_gave_up_waiting_for_its_own_swap_takes_it_back_and_proves_it(remote: RemoteSite) -> None:
    remote.twin.swap_fault = "begin"
    with pytest.raises(EngineUnreachableError, match="nobody knows"):
        remote.start(swap_timeout_s=0.1).reconcile()
    assert remote.journal.read().state == "SWAPPING"
    remote.twin.finish()
    outcome = remote.start().reconcile()
    assert (outcome.state, outcome.version) == ("WATCHING", "2")
    assert remote.engine.calls == ["probe 1", *TAKEN_BACK_AND_PROVEN]


# Restarts.


def test_a_restarted_engine_boots_with_the_champion_and_the_agent_goes_on(site: Site) -> None:
    site.settle()
    site.engine.boot("second")
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version, outcome.reason) == ("LIVE", "1", "the champion is live")
    assert [event["version"] for event in site.events("engine-restarted")] == ["1"]


def test_a_restart_in_the_middle_of_the_watch_begins_it_anew(site: Site) -> None:
    site.promote()
    site.agent.reconcile()
    site.engine.boot("second")
    site.engine.serve(num_steps=5000)
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version, outcome.decision) == ("LIVE", "1", "PASS")


def test_a_restarted_engine_with_something_else_is_brought_to_the_champion(site: Site) -> None:
    site.settle()
    site.journal.point_live("boot")
    site.engine.boot("second")
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version, site.journal.live_version()) == ("WATCHING", "1", "1")


def test_a_folder_of_the_same_name_with_other_weights_is_not_the_champion(site: Site) -> None:
    site.settle()
    site.engine.digest, site.engine.boot_id = "0" * 64, "second"
    site.agent.reconcile()
    assert site.engine.digest == (site.folder / "drafters" / "1" / artifact.MARKER).read_text()


def test_a_lost_replica_waits_for_its_restart_and_boots_with_what_was_good(site: Site) -> None:
    site.settle()
    version = site.promote(2.2)
    site.engine.raises[version] = [ReplicaLostError("version 2 failed and 1 could not be brought back")]
    outcome = site.agent.reconcile()
    assert outcome.state == "RESTART_NEEDED"
    assert outcome.reason == "restart this replica: version 2 failed and 1 could not be brought back"
    memory = site.journal.read()
    assert memory.restart_needed is not None
    assert (memory.restart_needed.boot_id, site.journal.live_version()) == ("first", "1")
    site.engine.calls.clear()
    site.promote(2.4)
    assert site.start().reconcile().state == "RESTART_NEEDED"
    assert site.engine.calls == []  # nothing is tried while that process lives
    site.engine.boot("second")
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version) == ("WATCHING", "3")
    assert site.journal.read().restart_needed is None


def test_the_version_that_lost_the_replica_is_not_tried_again(site: Site) -> None:
    site.settle()
    version = site.promote(2.2)
    site.engine.raises[version] = [ReplicaLostError("lost")]
    site.agent.reconcile()
    site.engine.boot("second")
    outcome = site.agent.reconcile()
    assert (outcome.version, site.engine.version) == ("1", "1")
    assert outcome.reason == "version 2 stays refused: lost"


def test_a_drafter_that_cannot_be_taken_back_needs_a_restart(site: Site) -> None:
    site.settle()
    site.promote(2.2)
    site.agent.reconcile()
    site.engine.tau_of["2"] = 1.0
    site.engine.serve(num_steps=1000)
    site.engine.raises["1"] = [SwapFailedError("a worker does not answer")]
    outcome = site.agent.reconcile()
    assert outcome.state == "RESTART_NEEDED"
    assert "a worker does not answer; vLLM cannot serve without" in outcome.reason
    assert site.journal.live_version() == "1"
    site.engine.boot("second")
    assert site.agent.reconcile().version == "1"
    assert site.alias == "1"


def test_an_engine_that_says_by_itself_that_it_needs_a_restart_is_believed(site: Site) -> None:
    site.settle()
    site.engine.restart_needed = "woken without its drafter"
    assert site.agent.reconcile().state == "RESTART_NEEDED"
    site.engine.boot("second")
    assert site.agent.reconcile().reason == "the champion is live"


def test_an_agent_that_died_before_it_learned_of_the_loss_learns_it_from_the_engine(site: Site) -> None:
    site.settle()
    site.promote(2.2)
    site.engine.die_at = "swapped"
    with pytest.raises(Killed):
        site.agent.reconcile()
    site.engine.restart_needed = "half loaded"
    assert site.start().reconcile().state == "RESTART_NEEDED"
    assert site.journal.read().refused == {"2": "half loaded"}


def test_an_engine_that_is_away_leaves_the_state_alone(site: Site) -> None:
    site.settle()
    before = site.journal.read()
    site.engine.away = True
    with pytest.raises(EngineUnreachableError):
        site.agent.reconcile()
    assert site.journal.read() == before


# Losslessness.


def test_a_lossless_engine_is_asked_around_the_first_swap_and_after_each_later_one(site: Site) -> None:
    site.settle()
    assert site.engine.asked.count("sampled without") == 1
    assert site.engine.asked.count("sampled with") == 2
    site.promote(2.2)
    site.agent.reconcile()
    assert site.engine.asked.count("sampled without") == 1  # no drafter has a part in it
    assert site.engine.asked.count("sampled with") == 3
    lossless = site.journal.read().lossless
    assert (lossless.version, lossless.greedy, lossless.sampling) == ("2", True, True)


def test_an_engine_that_was_never_lossless_is_told_of_and_the_drafter_stays(site: Site) -> None:
    site.engine.noise = True
    site.promote()
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version) == ("WATCHING", "1")
    assert site.journal.read().lossless.sampling is False
    assert "NOT lossless" in site.events("engine-not-lossless")[0]["reason"]


def test_sampling_that_breaks_with_the_swap_takes_the_drafter_back(site: Site) -> None:
    version = site.promote()
    site.engine.noisy_versions = {version}
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version) == ("ROLLED_BACK", "boot")
    assert outcome.reason.startswith("outputs are not the target's since the swap")


def test_an_engine_that_is_not_lossless_gets_no_drafter_where_that_is_asked_for(site: Site) -> None:
    site.engine.noise = True
    site.promote()
    agent = site.start(sampling_check="refuse")
    outcome = agent.reconcile()
    assert outcome.version == "boot"
    assert outcome.reason.startswith("the engine gets no drafter")
    asked = len(site.engine.asked)
    agent.reconcile()
    assert len(site.engine.asked) == asked  # once a process is enough


def test_the_check_can_be_left_out(site: Site) -> None:
    site.promote()
    assert site.start(sampling_check="off").reconcile().state == "WATCHING"
    assert site.engine.asked == []


def test_an_engine_that_cannot_be_asked_is_no_verdict_on_the_drafter(site: Site) -> None:
    site.engine.deaf_to_sampling = True
    site.promote()
    assert site.agent.reconcile().state == "WATCHING"
    lossless = site.journal.read().lossless
    assert (lossless.sampling, lossless.reason) == (None, "could not be asked: HTTP 500")


# What the engine wrote down.


def line(version: str, outcome: str, **facts: Any) -> str:
    return json.dumps({"time": 1764536400.5, "act": "drafter.swap", "outcome": outcome, "version": version, **facts})


def test_the_engines_own_audit_lines_reach_the_topic_once_each(site: Site) -> None:
    file = site.folder / "engine-audit.jsonl"
    file.write_text(line("1", "refused", reason="no verdict", serving="boot") + "\n" + line("2", "den")[:20])
    site.agent.reconcile()
    site.agent.reconcile()
    assert len(site.audit.records) == 1
    record = site.audit.records[0]
    assert (record.act, record.outcome, record.subject, record.time_ms) == (
        "drafter.swap",
        "refused",
        "drafter 1",
        1764536400500,
    )
    assert record.details == {"reason": "no verdict", "serving": "boot"}
    file.write_text(file.read_text()[:-20] + line("2", "denied") + "\nnonsense\n" + line("3", "done") + "\n")
    site.start().reconcile()
    assert [each.outcome for each in site.audit.records] == ["refused", "denied", "done"]
    assert [event["count"] for event in site.events("audit-lines-unreadable")] == [1]
    file.write_text(line("4", "failed") + "\n")  # begun anew
    site.agent.reconcile()
    assert [each.subject for each in site.audit.records][-1] == "drafter 4"


def test_lines_wait_while_the_audit_topic_is_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftloop.pipeline.errors import BrokerUnreachableError

    (site.folder / "engine-audit.jsonl").write_text(line("1", "done") + "\n")

    def away(self: MemoryAudit, record: Any) -> None:
        raise BrokerUnreachableError("nothing answers at 127.0.0.1:9092")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryAudit, "record", away)
        site.promote()
        assert site.agent.reconcile().state == "WATCHING"  # a swap does not wait for it
        site.agent.reconcile()
    assert len(site.events("audit-waits")) == 1
    site.agent.reconcile()
    assert [each.outcome for each in site.audit.records] == ["done"]


def test_metrics_tell_a_lost_replica_and_an_engine_that_is_not_lossless(site: Site) -> None:
    pytest.importorskip("prometheus_client")
    path = site.folder / "draftloop.prom"
    site.engine.noise = True
    site.promote()
    agent = site.start(metrics_file=path)
    agent.reconcile()
    text = path.read_text()
    assert "draftloop_sampling_lossless 0.0" in text
    assert "draftloop_greedy_lossless 1.0" in text
    assert "draftloop_restart_needed 0.0" in text
    site.engine.restart_needed = "woken without its drafter"
    agent.reconcile()
    assert "draftloop_restart_needed 1.0" in path.read_text()

"""The loop over real parts and a tiny target: capture, curate, train, replay, gate, register, swap, roll back."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from draftloop.pipeline.config import Config, load  # noqa: E402
from draftloop.pipeline.errors import InputError  # noqa: E402
from draftloop.pipeline.loop import RunResult, run_once  # noqa: E402
from draftloop.pipeline.records import Sampling  # noqa: E402
from draftloop.pipeline.registry.registry import MemoryRegistry  # noqa: E402
from draftloop.pipeline.rollout.agent import Agent  # noqa: E402
from draftloop.pipeline.signature import check  # noqa: E402
from draftloop.pipeline.stages import LoopStages  # noqa: E402
from draftloop.pipeline.ui import Screen  # noqa: E402
from draftloop.pipeline.workspace import Workspace  # noqa: E402
from draftloop.serving_hooks.capture import CaptureHook  # noqa: E402
from draftloop.serving_hooks.embedded.engine import EmbeddedEngine  # noqa: E402
from draftloop.serving_hooks.embedded.types import Request  # noqa: E402

QUIET = Screen(quiet=True)
SETTINGS = [
    'consent.version="test"',
    'consent.tenants.acme.purpose="train"',
    "loop.auto_promote=true",
    "loop.min_new_records=20",
    'engine.floor="none"',
    "engine.max_batch=16",
    "engine.max_sequence=128",
    "train.draft_vocab_size=96",
    "train.epochs=12",
    "train.tokens_per_batch=512",
    'train.dtype="float32"',
    'target.dtype="float32"',
    "gate.min_conversations=5",
    "gate.min_tokens=100",
    "seed=3",
]


@pytest.fixture(scope="module")
def chain_target(tiny_target: Any) -> Any:
    """A target that mostly answers token x with one fixed successor: small, and learnable as real text is.

    Its head is its embedding with the rows permuted, and its layers add little, so the successor wins by a margin.
    """
    import copy

    from draftloop.trainers.target import Target

    torch.manual_seed(5)
    config = copy.deepcopy(tiny_target.model.config)
    config.tie_word_embeddings = False
    model = type(tiny_target.model)(config)
    order = torch.randperm(126, generator=torch.Generator().manual_seed(5)) + 4
    with torch.no_grad():
        embedding = torch.randn(config.vocab_size, config.hidden_size)
        model.get_input_embeddings().weight.copy_(embedding)
        head = model.get_output_embeddings().weight
        head.zero_()
        head[order.roll(1)] = embedding[order]
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter.normal_(std=0.08)
    return Target.of(model, tiny_target.tokenizer, folder="chain", dtype="float32")


@dataclass
class Site:
    """One deployment: a running engine with its hook, a registry, an agent."""

    workspace: Workspace
    engine: EmbeddedEngine
    hook: CaptureHook
    registry: MemoryRegistry
    stages: LoopStages
    agent: Agent

    def serve(self, requests: list[Request]) -> list[Any]:
        done = self.engine.generate(requests)
        assert self.hook.flush(timeout_s=10)
        return done

    def cycle(self) -> RunResult:
        return run_once(self.workspace, self.stages, QUIET)

    def close(self) -> None:
        self.engine.stop()
        self.hook.close(timeout_s=5)


def site_at(folder: Path, target: Any) -> Site:
    config: Config = load([], [f"work='{folder}'", *SETTINGS])
    workspace = Workspace(config)
    hook = CaptureHook(
        workspace.open_log,
        topic=workspace.raw_topic(),
        policy=config.consent,
        target=target.fingerprint.digest,
        limits=config.capture,
    )
    engine = EmbeddedEngine(target, config.engine, capture=hook)
    engine.start()
    registry = MemoryRegistry()
    key = workspace.signing_key().public_key()
    agent = Agent(
        engine,
        registry,
        workspace.staging,
        check_verdict=lambda document, digest, target: check(document, key, digest=digest, fingerprint=target),
        canary_prompts=[(5, 6, 7), (8, 9, 10, 11)],
        config=config.agent,
    )
    return Site(workspace, engine, hook, registry, LoopStages(workspace, registry, target), agent)


def traffic(count: int, *, tenant: str = "acme", first: int = 0) -> list[Request]:
    chooser = random.Random(11)
    prompts = [tuple(chooser.randrange(3, 131) for _ in range(chooser.randrange(4, 9))) for _ in range(first + count)]
    return [
        Request(
            request_id=f"request-{index}",
            prompt_ids=prompts[index],
            sampling=Sampling(temperature=0.0, max_tokens=40),
            conversation_id=f"conversation-{index}",
            tenant=tenant,
            subject="s",
            slices={"domain": "even" if index % 2 else "odd"},
        )
        for index in range(first, first + count)
    ]


@pytest.fixture
def site(tmp_path: Path, chain_target: Any) -> Any:
    made = site_at(tmp_path / "work", chain_target)
    yield made
    made.close()


def test_the_loop_closes_and_greedy_outputs_do_not_change(site: Site) -> None:
    asked = traffic(80)
    before = site.serve(asked)
    result = site.cycle()
    assert result.outcome == "promoted", result.reason
    outcome = site.agent.reconcile()
    assert (outcome.state, outcome.version, outcome.outputs_identical) == ("WATCHING", "1", True)
    counted = site.engine.counters()
    after = site.serve(traffic(80, tenant="nobody"))
    assert [done.output_ids for done in after] == [done.output_ids for done in before]
    tau_engine = site.engine.counters().since(counted).tau
    assert result.details is not None
    assert tau_engine > 1.1
    heldout_tau = result.details["replay"]["challenger"]["tau"]
    assert heldout_tau > result.details["replay"]["champion"]["tau"] == 1.0


def test_replay_equals_the_engines_own_counters_on_the_same_requests(site: Site) -> None:
    from draftloop.pipeline.data.snapshot import Row
    from draftloop.pipeline.judge.replay import replay
    from draftloop.trainers.checkpoint import open_drafter

    site.serve(traffic(80))
    result = site.cycle()
    site.agent.reconcile()
    counted = site.engine.counters()
    done = site.serve(traffic(40, first=80))
    live = site.engine.counters().since(counted)
    assert result.details is not None
    drafter = open_drafter(Path(result.details["train"]["folder"]), fingerprint=site.stages.target.fingerprint)
    rows = [Row(x.request_id, x.request_id, list(x.prompt_ids), list(x.output_ids), {}, 0.0, []) for x in done]
    report = replay(site.stages.target, {"live": drafter}, rows, k=4, snapshot_id="live")["live"]
    assert (report.num_tokens, report.num_steps) == (live.num_emitted, live.num_steps)


def test_requests_without_permission_leave_no_record(site: Site) -> None:
    site.serve(traffic(30, tenant="nobody"))
    log = site.workspace.open_log()
    assert sum(log.end_offsets(site.workspace.raw_topic()).values()) == 0
    log.close()
    counters = site.hook.counters()
    assert counters["offered"] == 30
    assert site.cycle().outcome == "nothing-to-do"


def test_a_second_cycle_starts_warm_keeps_the_vocabulary_and_carries_the_old_heldout(site: Site) -> None:
    site.serve(traffic(80))
    first = site.cycle()
    site.agent.reconcile()
    site.serve(traffic(80, first=80))
    second = site.cycle()
    assert first.details is not None
    assert second.details is not None
    folders = [Path(cycle.details["train"]["folder"]) for cycle in (first, second) if cycle.details]
    manifests = [json.loads((folder / "manifest.json").read_bytes()) for folder in folders]
    assert manifests[0]["vocabulary_digest"] == manifests[1]["vocabulary_digest"]
    assert manifests[1]["parents"][0] == first.details["train"]["digest"]
    assert second.details["curate"]["counts"]["carried"]["heldout"] > 0


def test_the_same_seed_gives_the_same_snapshot_losses_and_verdict_twice(tmp_path: Path, chain_target: Any) -> None:
    seen = []
    for name in ("first", "second"):
        site = site_at(tmp_path / name, chain_target)
        try:
            site.serve(traffic(60))
            details = site.cycle().details
        finally:
            site.close()
        assert details is not None
        losses = [row["loss"] for row in details["train"]["history"]]
        evidence = details["gate"]["verdict"]["evidence"]
        del evidence["challenger_digest"]  # of the folder, whose manifest names how long training took
        seen.append((details["curate"]["snapshot"], details["curate"]["counts"], losses, evidence))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("change", [{"decision": "override"}, {"signature": None}, None])
def test_a_verdict_altered_between_gate_and_registry_is_not_registered(
    site: Site, change: dict[str, Any] | None
) -> None:
    site.serve(traffic(60))
    stopped = run_once(site.workspace, site.stages, QUIET, last="gate")
    assert stopped.folder is not None
    file = stopped.folder / "gate.json"
    written = json.loads(file.read_bytes())
    altered = {**written["verdict"], **change} if change is not None else None
    file.write_text(json.dumps({**written, "verdict": altered}))
    with pytest.raises(InputError, match=r"gate\.json: verdict") as caught:
        site.cycle()
    assert "remove the file" in str(caught.value.mend)
    assert (site.registry.champion(), site.registry.find(str(stopped.job_key))) == (None, None)
    file.unlink()
    assert site.cycle().outcome == "promoted"


def test_a_replay_report_that_was_cut_is_named_with_its_mend(site: Site) -> None:
    site.serve(traffic(60))
    stopped = run_once(site.workspace, site.stages, QUIET, last="replay")
    assert stopped.folder is not None
    (stopped.folder / "replay-challenger.json").write_text("{")
    with pytest.raises(InputError, match=r"replay-challenger\.json: not a replay report") as caught:
        site.cycle()
    assert str(stopped.folder / "replay.json") in str(caught.value.mend)
    (stopped.folder / "replay-challenger.json").unlink()
    with pytest.raises(InputError, match=r"replay-challenger\.json: No such file"):
        site.cycle()
    (stopped.folder / "replay.json").unlink()
    assert site.cycle().outcome == "promoted"


def test_a_slice_named_like_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().say("slice domain=[/red] [1, 2] [bold]x")  # slices come with the requests
    assert "slice domain=[/red] [1, 2] [bold]x" in capsys.readouterr().err

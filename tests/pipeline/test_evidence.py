"""The candidate tells the reviewer what was signed, over real snapshots, gates and verdicts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from samples import FINGERPRINT as TARGET

from draftloop.pipeline import artifact
from draftloop.pipeline.config import Config
from draftloop.pipeline.data.snapshot import Reject, Row, publish_snapshot
from draftloop.pipeline.errors import CheckpointError
from draftloop.pipeline.judge.gate import decide
from draftloop.pipeline.judge.report import ReplayReport, RequestReplay
from draftloop.pipeline.judge.verdict import sign
from draftloop.pipeline.records import SpecCounters
from draftloop.pipeline.registry.evidence import candidate
from draftloop.pipeline.registry.registry import Candidate
from draftloop.pipeline.rollout.canary import Expectation, depth_of, expectation_of


def row(number: int) -> Row:
    name = f"c{number}"
    return Row(f"r{number}", name, [1, 2], [3, 4, 5], {"domain": "kitchen"}, 0.0, [-0.1, -0.2, -0.3])


def report(drafter: str, digest: str | None, snapshot: str, num_steps: int) -> ReplayReport:
    """40 conversations of 60 tokens in two domains, all drafted alike."""
    requests = tuple(
        RequestReplay(
            record_id=f"r{number}",
            conversation_id=f"c{number}",
            slices={"domain": "kitchen" if number % 2 else "python"},
            num_tokens=60,
            num_steps=num_steps,
            accepted_at_least=(60 - num_steps, 0, 0, 0),
        )
        for number in range(40)
    )
    return ReplayReport(
        drafter=drafter, snapshot_id=snapshot, k=4, requests=requests, target=TARGET.digest, drafter_digest=digest
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outputs of a job's stages, and its two reports."""
    home: Path = tmp_path_factory.mktemp("job")
    snapshot = publish_snapshot(
        home,
        train=[row(number) for number in range(5)],
        heldout=[row(9)],
        rejects=[Reject("aborted", 0, 6, "r6")],
        fingerprint=TARGET,
        source={"topic": "draftloop.raw.x", "offsets": {"0": [0, 6]}, "captured": 6, "parent": None},
        rules={},
    )
    folder = home / "drafter"
    with artifact.staging(folder) as draft:
        (draft / "model.safetensors").write_bytes(b"weights")
        artifact.publish(draft, folder, {"parents": ["p" * 64]})
    digest = (folder / artifact.MARKER).read_text()
    reports = {
        "challenger": report("challenger", digest, snapshot.id, 40),
        "champion": report("champion", "p" * 64, snapshot.id, 50),
    }
    verdict = decide(reports["challenger"], reports["champion"], Config().gate, seed=0)
    signed = sign(
        verdict,
        digest=digest,
        fingerprint=TARGET,
        snapshot_id=snapshot.id,
        champion_digest="p" * 64,
        job_key="a1b2",
        key=Ed25519PrivateKey.generate(),
    )
    counts = {"captured": 6, "kept": 5, "rejected": {"aborted": 1}, "carried": {"train": 1, "heldout": 0}}
    trained = {"folder": str(folder), "digest": digest, "num_steps": 20, "num_tokens": 900, "seconds": 3.0}
    trained |= {"tokens_per_s": 300.0, "heldout_tau": 1.5, "history": [{"step": 20, "loss": 2.0, "heldout_tau": 1.5}]}
    outputs = {
        "curate": {"snapshot": snapshot.id, "folder": str(snapshot.folder), "counts": counts},
        "train": trained,
        "gate": {"verdict": signed},
    }
    return {"outputs": outputs, **reports}


def make(job: dict[str, Any]) -> Candidate:
    return candidate(
        "a1b2",
        job["outputs"],
        challenger=job["challenger"],
        champion=job["champion"],
        champion_version="3",
        config=Config(),
        fingerprint=TARGET,
        peak_rss_mb=512,
    )


def test_the_candidate_carries_the_signed_numbers(job: dict[str, Any]) -> None:
    made = make(job)
    assert made.verdict == job["outputs"]["gate"]["verdict"]
    assert made.metrics["replay.tau"] == 1.5
    assert made.metrics["replay.ratio"] == 1.25
    assert made.metrics["replay.position_1"] == 0.5
    assert made.tags["gate"] == "passed"
    assert made.description.startswith("# drafter: tau 1.20 to 1.50 (+25.0%, 95% interval ")
    assert "6 records captured = 5 kept + 1 rejected" in made.description
    assert "draftloop rollback 3" in made.description
    assert made.tables["slices.json"]["name"] == ["kitchen", "python"]
    assert sorted(made.plots) == ["acceptance_by_position.png", "gain_by_slice.png", "training.png"]
    assert len(made.tags) <= 5


def test_lineage_names_the_window_and_holds_no_content(job: dict[str, Any]) -> None:
    assert dict(make(job).snapshot_source) == {"topic": "draftloop.raw.x", "offsets": "0:0-6"}


def test_the_agent_reads_its_expectation_from_the_same_verdict(job: dict[str, Any]) -> None:
    document = job["outputs"]["gate"]["verdict"]
    found = expectation_of(document)
    assert isinstance(found, Expectation)
    assert found.tau == 1.5
    assert 1.0 < found.low <= 1.5 <= found.high
    assert depth_of(document, SpecCounters(10, 20, 38, 10)) == 4


def test_a_drafter_altered_since_training_makes_no_candidate(job: dict[str, Any], tmp_path: Path) -> None:
    copy = shutil.copytree(job["outputs"]["train"]["folder"], tmp_path / "drafter")
    (copy / "model.safetensors").write_bytes(b"evil")
    altered = {**job["outputs"], "train": {**job["outputs"]["train"], "folder": str(copy)}}
    with pytest.raises(CheckpointError, match="altered"):
        make({**job, "outputs": altered})

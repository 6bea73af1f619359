"""What every registry must do, asked of the in-memory twin and of MLflow on a SQLite file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import CheckpointError, VersionNotFoundError
from draftloop.pipeline.registry.mlflow_registry import MlflowRegistry
from draftloop.pipeline.registry.registry import Candidate, MemoryRegistry, Registry


@pytest.fixture(scope="module")
def mlflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(params=["memory", "mlflow"])
def registry(request: pytest.FixtureRequest, mlflow_home: Path) -> Registry:
    """A registry without versions: one database for the module, one registered model for each test."""
    if request.param == "memory":
        return MemoryRegistry()
    return MlflowRegistry(f"sqlite:///{mlflow_home}/mlflow.db", request.node.originalname, mlflow_home / "artifacts")


def make_candidate(folder: Path, job_key: str = "a1", weights: bytes = b"weights") -> Candidate:
    final = folder / job_key / "drafter"
    with artifact.staging(final) as draft:
        (draft / "model.safetensors").write_bytes(weights)
        (draft / "config.json").write_text("{}")
        artifact.publish(draft, final, {"family": "eagle3"})
    digest = (final / artifact.MARKER).read_text()
    return Candidate(
        job_key=job_key,
        folder=final,
        digest=digest,
        verdict={"digest": digest, "signature": "s"},
        description=f"# drafter of job {job_key}",
        tags={"gate": "passed", "gain": "+12%"},
        params={"lr": 0.001, "blocks": 2},
        metrics={"tau": 2.5},
        history=({"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}),
        plots={"positions.png": b"\x89PNG"},
        tables={"slices.json": {"slice": ["en", "de"], "tau": [2.5, 2.25]}},
        snapshot_id="c0ffee" * 10 + "0000",
        snapshot_source={"topic": "draftloop.raw.x", "offsets": "0:0-10"},
    )


def test_a_registered_candidate_is_found_by_its_job(registry: Registry, tmp_path: Path) -> None:
    made = make_candidate(tmp_path)
    version = registry.register(made)
    assert registry.find("a1") == version
    assert (version.version, version.job_key, version.digest) == ("1", "a1", made.digest)
    assert version.description == made.description
    assert dict(version.tags) == dict(made.tags)
    assert registry.find("b2") is None


def test_registering_a_job_twice_gives_the_first_version(registry: Registry, tmp_path: Path) -> None:
    made = make_candidate(tmp_path)
    assert registry.register(made) == registry.register(made)


def test_registering_promotes_nothing(registry: Registry, tmp_path: Path) -> None:
    assert registry.champion() is None
    registry.register(make_candidate(tmp_path))
    assert registry.champion() is None
    assert registry.champions() == []


def test_promotion_copies_the_candidate_and_makes_it_champion(registry: Registry, tmp_path: Path) -> None:
    made = make_candidate(tmp_path)
    registry.register(make_candidate(tmp_path, "b2"))
    champion = registry.promote(registry.register(made).version, by="ann", reason="gains")
    assert (champion.version, champion.job_key, champion.digest) == ("1", "a1", made.digest)
    live = registry.champion()
    assert live is not None
    assert live.version == "1"
    assert [version.version for version in registry.champions()] == ["1"]


def test_the_alias_goes_back_to_an_earlier_champion(registry: Registry, tmp_path: Path) -> None:
    for key in ("a1", "b2"):
        registry.promote(registry.register(make_candidate(tmp_path, key)).version, by="ann", reason="gains")
    live = registry.champion()
    assert live is not None
    assert live.version == "2"
    assert registry.set_champion("1", by="agent", reason="acceptance fell").job_key == "a1"
    live = registry.champion()
    assert live is not None
    assert live.version == "1"
    assert [version.version for version in registry.champions()] == ["1", "2"]


def test_fetch_brings_the_drafter_of_that_version_whole(registry: Registry, tmp_path: Path) -> None:
    for key in ("a1", "b2"):
        made = make_candidate(tmp_path, key, weights=key.encode())
        registry.promote(registry.register(made).version, by="ann", reason="gains")
    folder = registry.fetch("1", tmp_path / "staging" / "1")
    assert folder == tmp_path / "staging" / "1"
    artifact.verify(folder, kind="drafter", error=CheckpointError)
    assert (folder / "model.safetensors").read_bytes() == b"a1"


def test_the_verdict_of_a_champion_is_the_document_that_was_registered(registry: Registry, tmp_path: Path) -> None:
    made = make_candidate(tmp_path)
    made = replace(made, verdict={**made.verdict, "evidence": {"tau": 2.123456789012345, "reasons": ["ok", "né"]}})
    registry.promote(registry.register(made).version, by="ann", reason="gains")
    assert json.dumps(registry.verdict("1"), sort_keys=True) == json.dumps(dict(made.verdict), sort_keys=True)


@pytest.mark.parametrize("version", ["9", "abc", ""])
def test_an_unknown_version_is_named_in_the_error(registry: Registry, tmp_path: Path, version: str) -> None:
    registry.promote(registry.register(make_candidate(tmp_path)).version, by="ann", reason="gains")
    calls: list[Any] = [
        lambda: registry.promote(version, by="ann", reason="gains"),
        lambda: registry.set_champion(version, by="ann", reason="gains"),
        lambda: registry.fetch(version, tmp_path / "nowhere"),
        lambda: registry.verdict(version),
    ]
    for call in calls:
        with pytest.raises(VersionNotFoundError, match=f"version {version}"):
            call()
    assert not (tmp_path / "nowhere").exists()

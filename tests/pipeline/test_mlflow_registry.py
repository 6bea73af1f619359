"""What only MLflow can get wrong: half-made registrations, aliases without a version, chatter, traffic to its maker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import CheckpointError, ConfigError, RegistryError
from draftloop.pipeline.registry.mlflow_registry import MlflowRegistry
from draftloop.pipeline.registry.registry import Candidate

pytest.importorskip("mlflow")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return "".join(sign if sign.isalnum() else "-" for sign in request.node.name)


@pytest.fixture
def registry(home: Path, name: str) -> MlflowRegistry:
    """An empty registered model of its own in the module's database."""
    return MlflowRegistry(f"sqlite:///{home}/mlflow.db", name, home / "artifacts")


def client_of(home: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db", registry_uri=f"sqlite:///{home}/mlflow.db")


def make_candidate(folder: Path, job_key: str = "a1") -> Candidate:
    final = folder / job_key
    with artifact.staging(final) as draft:
        (draft / "model.safetensors").write_bytes(job_key.encode())
        artifact.publish(draft, final, {"family": "eagle3"})
    return Candidate(
        job_key=job_key,
        folder=final,
        digest=(final / artifact.MARKER).read_text(),
        verdict={"signature": {"value": "s"}},
        description="# the decision",
        tags={"gate": "passed", "gain": "+12%"},
        params={"lr": 0.001, "heads": 4},
        metrics={"tau": 2.5, "not_measured": float("nan")},
        history=({"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0, "heldout_tau": 1.5}),
        plots={"training.png": b"\x89PNG"},
        tables={"slices.json": {"slice": ["en", "de"], "tau": [2.5, 2.25]}},
        snapshot_id="5" * 64,
        snapshot_source={"topic": "draftloop.raw.x", "offsets": "0:0-10"},
    )


def the_run(home: Path, name: str) -> Any:
    client = client_of(home)
    runs = client.search_runs([client.get_experiment_by_name(name).experiment_id])
    assert len(runs) == 1
    return runs[0]


def test_the_run_holds_what_a_reviewer_needs(registry: MlflowRegistry, home: Path, name: str, tmp_path: Path) -> None:
    made = make_candidate(tmp_path)
    registry.register(made)
    client, run = client_of(home), the_run(home, name)
    assert run.info.status == "FINISHED"
    assert run.data.tags["retrain.key"] == "a1"
    assert run.data.params == {"lr": "0.001", "heads": "4"}
    assert run.data.metrics == {"tau": 2.5, "loss": 2.0, "heldout_tau": 1.5}
    assert [(seen.step, seen.value) for seen in client.get_metric_history(run.info.run_id, "loss")] == [
        (10, 3.0),
        (20, 2.0),
    ]
    assert sorted(file.path for file in client.list_artifacts(run.info.run_id, "review")) == [
        "review/card.md",
        "review/slices.json",
        "review/training.png",
    ]
    lineage = run.inputs.dataset_inputs[0]
    assert (lineage.dataset.name, lineage.dataset.digest) == ("snapshot-" + "5" * 12, "5" * 32)
    told = {tag.key: tag.value for tag in lineage.tags}
    assert told == {"mlflow.data.context": "training", "snapshot": "5" * 64} | dict(made.snapshot_source)
    version = client.get_model_version(f"{name}-candidates", "1")
    assert version.description == "# the decision"
    assert version.tags == {"gate": "passed", "gain": "+12%"}


@pytest.mark.filterwarnings("ignore:For backward compatibility:Warning")  # pandas, inside MLflow's own log_table
def test_a_review_table_has_the_form_of_mlflows_own(
    registry: MlflowRegistry, home: Path, name: str, tmp_path: Path
) -> None:
    made = make_candidate(tmp_path)
    registry.register(made)
    client, run_id = client_of(home), the_run(home, name).info.run_id
    tag = "mlflow.loggedArtifacts"
    ours = the_run(home, name).data.tags[tag]
    client.delete_tag(run_id, tag)
    client.log_artifact(run_id, client.download_artifacts(run_id, "review/slices.json"), "ours")
    client.log_table(run_id, dict(made.tables["slices.json"]), "theirs/slices.json")
    theirs = the_run(home, name).data.tags[tag]
    assert json.loads(ours) == json.loads(theirs.replace("theirs/", "review/"))
    tables = [
        json.loads(Path(client.download_artifacts(run_id, f"{at}/slices.json")).read_text())
        for at in ("ours", "theirs")
    ]
    assert tables[0] == tables[1]


STEPS = (
    "create_run",
    "log_batch",
    "log_inputs",
    "log_artifacts",
    "create_logged_model",
    "log_model_artifacts",
    "finalize_logged_model",
    "create_registered_model",
    "create_model_version",
    "set_terminated",
)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_registration_cut_off_anywhere_ends_with_one_version(
    registry: MlflowRegistry,
    home: Path,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    done: bool,
) -> None:
    from mlflow import MlflowClient

    whole = getattr(MlflowClient, step)

    def cut(self: Any, *arguments: Any, **named: Any) -> None:
        if done:
            whole(self, *arguments, **named)
        raise KeyboardInterrupt(step)

    made = make_candidate(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, step, cut)
        with pytest.raises(KeyboardInterrupt):
            registry.register(made)
    again = MlflowRegistry(f"sqlite:///{home}/mlflow.db", name, home / "artifacts")
    assert again.register(made).version == "1"
    assert again.register(made).version == "1"
    client = client_of(home)
    assert len(client.search_model_versions(f"name='{name}-candidates'")) == 1
    run = the_run(home, name)
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 2
    assert len(run.inputs.dataset_inputs) == 1
    models = client.search_logged_models([run.info.experiment_id])
    assert [str(model.status) for model in models] == ["READY"]
    champion = again.promote("1", by="ann", reason="gains")
    artifact.verify(again.fetch(champion.version, tmp_path / "fetched"), kind="drafter", error=CheckpointError)


@pytest.mark.parametrize("step", ["copy_model_version", "set_model_version_tag", "set_registered_model_alias"])
def test_a_promotion_cut_off_and_repeated_makes_one_champion(
    registry: MlflowRegistry, home: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    from mlflow import MlflowClient

    whole = getattr(MlflowClient, step)

    def cut(self: Any, *arguments: Any, **named: Any) -> None:
        whole(self, *arguments, **named)
        raise KeyboardInterrupt(step)

    registry.register(make_candidate(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, step, cut)
        with pytest.raises(KeyboardInterrupt):
            registry.promote("1", by="ann", reason="gains")
    assert registry.promote("1", by="ann", reason="gains").version == "1"
    assert [version.version for version in registry.champions()] == ["1"]


def test_a_decision_says_who_when_and_why(registry: MlflowRegistry, tmp_path: Path) -> None:
    registry.register(make_candidate(tmp_path))
    tags = registry.promote("1", by="ann", reason="gains 12%").tags
    assert (tags["review.by"], tags["review.reason"]) == ("ann", "gains 12%")
    assert tags["review.at"].endswith("+00:00")


def test_deleting_the_champion_version_or_alias_means_keep_what_is_live(
    registry: MlflowRegistry, home: Path, name: str, tmp_path: Path
) -> None:
    for key in ("a1", "b2"):
        registry.promote(registry.register(make_candidate(tmp_path, key)).version, by="ann", reason="gains")
    client = client_of(home)
    client.delete_model_version(name, "2")
    assert registry.champion() is None
    registry.set_champion("1", by="ann", reason="back")
    client.delete_registered_model_alias(name, "champion")
    assert registry.champion() is None


def test_an_alias_that_moves_while_a_version_is_promoted_stops_the_promotion(
    registry: MlflowRegistry, home: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    for key in ("a1", "b2"):
        registry.register(make_candidate(tmp_path, key))
    registry.promote("1", by="ann", reason="gains")
    whole = MlflowClient.copy_model_version

    def copy_and_meddle(self: Any, source: str, name: str) -> Any:
        copy = whole(self, source, name)
        self.delete_registered_model_alias(name, "champion")
        return copy

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "copy_model_version", copy_and_meddle)
        with pytest.raises(RegistryError, match="moved from 1 to None while 2 was being appointed"):
            registry.promote("2", by="ann", reason="gains")
    assert registry.champion() is None


def test_a_candidate_whose_folder_was_altered_is_not_registered(registry: MlflowRegistry, tmp_path: Path) -> None:
    made = make_candidate(tmp_path)
    with pytest.raises(CheckpointError, match="the candidate names 000000000000"):
        registry.register(replace(made, digest="0" * 64))
    (made.folder / "model.safetensors").write_bytes(b"evil")
    with pytest.raises(CheckpointError, match="altered"):
        registry.register(made)
    assert registry.find("a1") is None


def test_artifacts_exchanged_after_review_are_caught_at_fetch(
    registry: MlflowRegistry, home: Path, name: str, tmp_path: Path
) -> None:
    champion = registry.promote(registry.register(make_candidate(tmp_path)).version, by="ann", reason="gains")
    stored = Path(client_of(home).get_model_version_download_uri(name, champion.version)) / "drafter"
    (stored / "model.safetensors").write_bytes(b"evil")
    with pytest.raises(CheckpointError, match="altered"):
        registry.fetch(champion.version, tmp_path / "fetched")
    shutil.rmtree(stored)
    shutil.copytree(make_candidate(tmp_path, "b2").folder, stored)
    with pytest.raises(CheckpointError, match="holds another drafter than was registered"):
        registry.fetch(champion.version, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()
    shutil.rmtree(stored)
    with pytest.raises(RegistryError):
        registry.fetch(champion.version, tmp_path / "fetched")


@pytest.mark.parametrize("name", ["a/b", "a:b", "", "a'b"])
def test_a_name_mlflow_cannot_hold_is_refused_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be a registered model's name"):
        MlflowRegistry(f"sqlite:///{tmp_path}/mlflow.db", name, tmp_path)


def test_more_than_five_tags_or_a_review_file_in_a_folder_is_refused(registry: MlflowRegistry, tmp_path: Path) -> None:
    made = make_candidate(tmp_path)
    with pytest.raises(ConfigError, match="6 tags"):
        registry.register(replace(made, tags={str(number): "x" for number in range(6)}))
    with pytest.raises(ConfigError, match="not a plain file name"):
        registry.register(replace(made, plots={"../x.png": b""}))


def test_a_tracking_address_that_is_no_database_is_a_registry_error(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, but long enough to be read as one" * 10)
    with pytest.raises(RegistryError, match="reading the champion of drafter"):
        MlflowRegistry(f"sqlite:///{tmp_path}/mlflow.db", "drafter", tmp_path).champion()


CHILD = """
import os, socket, sys
import draftloop.pipeline.registry.mlflow_registry as room
assert "mlflow" not in sys.modules, "importing the adapter must not import MLflow"
def refuse(self, address, *rest):
    raise SystemExit(f"connection to {address}")
socket.socket.connect = refuse
socket.getaddrinfo = lambda *arguments, **named: (_ for _ in ()).throw(SystemExit(f"lookup of {arguments}"))
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_mlflow_registry import make_candidate
home = Path(sys.argv[2])
os.chdir(home)
registry = room.MlflowRegistry("sqlite:///mlflow.db", "drafter", None)
registry.promote(registry.register(make_candidate(home / "made")).version, by="ann", reason="gains")
registry.fetch(registry.champion().version, home / "fetched")
import threading, mlflow
from mlflow.telemetry.client import get_telemetry_client
assert get_telemetry_client() is None
assert not [thread.name for thread in threading.enumerate() if "elemetry" in thread.name]
"""


def test_nothing_is_sent_printed_or_left_elsewhere(tmp_path: Path) -> None:
    # A child: MLflow switches its telemetry off under pytest and in CI by itself, and users have neither.
    hidden = ("PYTEST", "CI", "GITHUB_", "JENKINS", "MLFLOW", "DO_NOT_TRACK", "BUILD")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, str(Path(__file__).parent), str(tmp_path)],
        env=environment | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fetched", "made", "mlflow-artifacts", "mlflow.db"]


OUT_OF_SPACE = """
import resource, signal, sys
from draftloop.pipeline.errors import RegistryError
from draftloop.pipeline.registry.mlflow_registry import MlflowRegistry
resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))  # in the middle of its migrations
try:
    MlflowRegistry(sys.argv[1], "drafter").champion()
except RegistryError:
    sys.exit(0)
sys.exit("it fitted")
"""


def test_a_database_whose_making_was_cut_off_is_made_again(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    subprocess.run([sys.executable, "-c", OUT_OF_SPACE, uri], check=True, timeout=120)
    left = tmp_path / ".mlflow.db.killed00"
    left.mkdir()
    assert MlflowRegistry(uri, "drafter").champion() is None
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_an_address_with_options_names_the_file_before_them(tmp_path: Path) -> None:
    assert MlflowRegistry(f"sqlite:///{tmp_path}/mlflow.db?timeout=30", "drafter").champion() is None
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_verdict_that_is_no_document_is_an_error_of_the_version(
    registry: MlflowRegistry, home: Path, tmp_path: Path, content: bytes
) -> None:
    registry.register(make_candidate(tmp_path))
    registry.promote("1", by="ann", reason="gains")
    (written,) = (home / "artifacts" / registry._name).rglob("review/verdict.json")
    written.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"version 1 of .*: its verdict is not a JSON object"):
        registry.verdict("1")

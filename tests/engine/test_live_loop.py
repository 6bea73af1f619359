"""The demo's whole story on a real vLLM server over a tiny target, shortened."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from live_site import TinySite

from draftloop.pipeline.config import Config
from draftloop.pipeline.demo import demo_config, run_demo
from draftloop.pipeline.errors import ConfigError, InputError
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.workspace import Workspace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]  # three server starts

SETTINGS = [
    "engine=vllm",
    'target.dtype="float32"',
    "demo.first_requests=90",
    "demo.shifted_requests=70",
    "demo.max_tokens=48",
    "demo.watch_requests=24",
    "demo.speed_pairs=2",
    "demo.speed_tokens=24",
    "loop.min_new_records=20",
    "train.draft_vocab_size=768",
    "train.epochs=10",
    "train.tokens_per_batch=1024",
    'train.dtype="float32"',
    "gate.min_conversations=5",
    "gate.min_tokens=100",
    "agent.canary.settle_steps=40",
    'agent.sampling_check="off"',  # this release samples noise with any drafter: see test_live_agent.py
]


def settings(python: Path, target: Path, work: Path, *more: str) -> Config:
    return demo_config([], [*SETTINGS, f"vllm.python='{python}'", f"work='{work}'", *more], str(target))


@pytest.fixture(scope="module")
def played(engine_python: Path, tiny: TinySite, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("loop") / "work"
    result = run_demo(Workspace(settings(engine_python, tiny.target_folder, work)), Screen(quiet=True))
    return json.loads(json.dumps(result))


def test_the_loop_closes_in_a_running_vllm(played: dict[str, Any]) -> None:
    first, second = played["cycles"]
    assert (played["engine"], first["verdict"]) == ("vllm", "promoted")
    assert first["tau_before"] == 1.0
    assert first["tau_after"] > 1.3
    assert first["tau_engine"] > 1.3
    assert second["domain"] == "python"
    assert played["counts"]["kept"] + sum(played["counts"]["rejected"].values()) == played["counts"]["captured"]


def test_the_swapped_server_emits_what_replay_says(played: dict[str, Any]) -> None:
    for cycle in played["cycles"]:
        assert cycle["tau_engine"] == pytest.approx(cycle["tau_replay_of_engine"], rel=0.005)
        assert cycle["tau_counted"] >= cycle["tau_engine"]  # past a stop or the length too
    assert abs(played["replayed"]["difference"]) <= 0.005
    assert played["replayed"]["version"] == "1"


def test_no_output_changed_with_the_swap(played: dict[str, Any]) -> None:
    swapped = [cycle for cycle in played["cycles"] if cycle["swap_ms"] is not None]
    assert swapped
    assert [cycle["near_ties"] for cycle in swapped] == [[]] * len(swapped)  # fp32: token by token


def test_what_was_captured_over_http_is_accounted_for(played: dict[str, Any]) -> None:
    capture = played["capture"]
    dropped = sum(count for name, count in capture.items() if name.startswith("dropped."))
    assert capture["offered"] == capture["delivered"] + dropped
    assert capture["dropped.policy:no_consent"] > 0
    assert played["counts"]["rejected"]["aborted"] >= 1  # a client that hung up


def test_the_damaged_drafter_is_taken_back_and_a_restarted_server_boots_with_the_champion(
    played: dict[str, Any],
) -> None:
    assert played["rolled_back"] is True
    assert played["restart"]["boots_with_champion"] is True
    assert played["restart"]["version"] == played["restart"]["champion"] != "boot"


def test_speed_with_and_without_a_drafter_is_measured_on_two_servers(played: dict[str, Any]) -> None:
    speed = played["cycles"][-1]["speed"]
    assert set(speed) == {"1", "8"}
    assert all(row["num_differing"] == 0 for row in speed.values())  # fp32


def test_kafka_as_the_log_is_refused_at_once_where_the_engine_has_no_client_for_it(
    engine_python: Path, tmp_path: Path
) -> None:
    has_client = subprocess.run([engine_python, "-c", "import kafka"], capture_output=True, check=False, cwd="/")
    if has_client.returncode == 0:
        pytest.skip("this engine environment has a Kafka client")
    config = settings(engine_python, tmp_path / "no-target", tmp_path / "work", "log=kafka")
    with pytest.raises(ConfigError, match="no Kafka client") as caught:
        run_demo(Workspace(config), Screen(quiet=True))
    assert "draftloop[kafka]" in str(caught.value.mend)
    assert not (tmp_path / "work").exists()


def test_a_missing_engine_is_named_with_how_to_get_one(tmp_path: Path) -> None:
    config = settings(tmp_path / "none", tmp_path / "no-target", tmp_path / "work")
    with pytest.raises(InputError, match="no engine at") as caught:
        run_demo(Workspace(config), Screen(quiet=True))
    assert "make engine" in str(caught.value.mend)

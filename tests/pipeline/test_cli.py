"""The command line from outside: exit codes, one JSON object on stdout, errors with their mend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftloop.pipeline.lease import lease


def draftloop(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "draftloop.pipeline.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "run-once",
        "curate",
        "train",
        "replay",
        "gate",
        "register",
        "promote",
        "rollback",
        "ingest",
        "status",
        "doctor",
        "config",
    ],
)
def test_every_command_answers_help(command: str, tmp_path: Path) -> None:
    done = draftloop(command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_an_unknown_command_is_bad_usage(tmp_path: Path) -> None:
    assert draftloop("nonsense", cwd=tmp_path).returncode == 2


def test_an_unknown_setting_exits_2_and_says_so_in_json_too(tmp_path: Path) -> None:
    done = draftloop("status", "train.epoch=3", "--json", cwd=tmp_path)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["class"] == "ConfigError"
    assert "train.epoch" in error["message"]
    assert "epochs" in error["mend"]


def test_json_output_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    done = draftloop("status", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["champion"] is None


def test_status_of_a_folder_never_used_makes_nothing(tmp_path: Path) -> None:
    draftloop("status", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_not_there_exits_2_and_names_it(tmp_path: Path) -> None:
    done = draftloop("run-once", "--target", str(tmp_path / "no-model"), "loop.min_new_records=1", cwd=tmp_path)
    # Nothing captured yet: the loop says so before it needs a target.
    assert done.returncode == 0
    done = draftloop("doctor", "--target", str(tmp_path / "no-model"), "--json", cwd=tmp_path)
    assert done.returncode == 1
    finding = next(check for check in json.loads(done.stdout)["checks"] if check["check"] == "target")
    assert "no-model" in finding["detail"]
    assert finding["mend"]


def test_a_run_beside_a_run_exits_75(tmp_path: Path) -> None:
    with lease(tmp_path / "work" / "lease.lock", what="run"):
        done = draftloop("run-once", "--json", cwd=tmp_path)
    assert done.returncode == 75
    assert json.loads(done.stdout)["error"]["class"] == "LeaseHeldError"

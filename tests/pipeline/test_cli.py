"""The command line from outside: exit codes, one JSON object on stdout, errors with their mend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftloop.pipeline.config import load
from draftloop.pipeline.lease import lease
from draftloop.pipeline.stream.log import LogEntry
from draftloop.pipeline.workspace import Workspace


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
        "audit",
        "broker up",
        "broker down",
        "broker status",
        "broker logs",
        "broker fetch",
        "broker certificates",
        "broker admit",
        "access plan",
        "access apply",
        "access verify",
        "bench log",
        "bench curate",
        "bench capture",
    ],
)
def test_every_command_answers_help(command: str, tmp_path: Path) -> None:
    done = draftloop(*command.split(), "--help", cwd=tmp_path)
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


@pytest.mark.parametrize("arguments", [["nonsense"], ["config", "--nonsense"], ["promote"], ["config", "--config"]])
def test_bad_usage_is_one_json_object_too(arguments: list[str], tmp_path: Path) -> None:
    done = draftloop(*arguments, "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["message"]
    assert done.stderr


def test_a_work_folder_that_is_a_file_is_named_with_its_mend(tmp_path: Path) -> None:
    (tmp_path / "work").touch()
    for command in (["run-once"], ["rollback"], ["doctor", "--target", str(tmp_path)]):
        done = draftloop(*command, "--json", cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "work" in done.stdout
    assert draftloop("status", "--json", cwd=tmp_path).returncode == 2


def test_an_error_that_nobody_foresaw_is_one_json_object_too(tmp_path: Path) -> None:
    code = (
        "import sys; from draftloop.pipeline import cli; cli._config = lambda *a, **k: {}['x'];"
        "sys.argv = ['draftloop', 'config', '--json']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["class"] == "KeyError"
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
def test_status_tells_of_damaged_files_and_of_everything_else(content: bytes, tmp_path: Path) -> None:
    log = Workspace(load([], [f"work='{tmp_path / 'work'}'", "target.path='my-llama'"])).open_log()
    log.append("draftloop.raw.my-llama", [LogEntry(b"k", b"v")])
    log.close()
    for name in ("jobs/current.json", "agent/state.json"):
        (tmp_path / "work" / name).parent.mkdir()
        (tmp_path / "work" / name).write_bytes(content)
    done = draftloop("status", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "current.json" in found["job"]["error"]
    assert "state.json" in found["agent"]["error"]
    # Without being told the target, and without making a topic for the default one.
    assert found["log"] == [{"topic": "draftloop.raw.my-llama", "records": 1, "not_yet_used": 1}]
    assert "state.json cannot be read" in draftloop("status", cwd=tmp_path).stdout


def test_json_output_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    done = draftloop("status", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["champion"] is None


def test_status_of_a_folder_never_used_makes_nothing(tmp_path: Path) -> None:
    draftloop("status", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_not_there_exits_2_and_names_it(tmp_path: Path) -> None:
    done = draftloop("run-once", "--target", str(tmp_path / "no-model"), "--json", cwd=tmp_path)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["class"] == "ModelNotFoundError"
    assert "no-model" in error["message"]
    assert list(tmp_path.iterdir()) == [], "a mistyped path would have its own topic, empty for ever"
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


def test_without_jars_the_broker_says_every_way_to_get_them(tmp_path: Path) -> None:
    done = draftloop("broker", "up", "--home", "home", "--libs", str(tmp_path), "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)["error"]
    assert done.returncode == 1
    assert answer["class"] == "KafkaJarsNotFoundError"
    for way in ("--libs", "$DRAFTLOOP_KAFKA_LIBS", "$KAFKA_HOME", "draftloop broker fetch"):
        assert way in answer["mend"]


def test_access_without_a_home_names_the_file_and_how_it_is_made(tmp_path: Path) -> None:
    done = draftloop("access", "plan", "--home", "nowhere", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)["error"]
    assert done.returncode == 2
    assert "admin.toml" in answer["message"]
    assert "draftloop broker up" in answer["mend"]


def test_kafka_as_the_log_without_an_address_says_what_is_missing(tmp_path: Path) -> None:
    done = draftloop("status", "log=kafka", "work=w", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr  # a folder never used yet is an empty state
    (tmp_path / "w").mkdir()
    found = json.loads(draftloop("status", "log=kafka", "work=w", "--json", cwd=tmp_path).stdout)
    assert "log.kafka.bootstrap" in found["log"][0]["error"]


def test_a_value_under_a_name_that_sounds_secret_is_not_repeated(tmp_path: Path) -> None:
    for setting in ('log.kafka.security.password="hunter2"', 'log.kafka.sasl="hunter2"', 'log.secret="hunter2"'):
        done = draftloop("config", setting, "--json", cwd=tmp_path)
        assert done.returncode == 2
        assert "hunter2" not in done.stdout + done.stderr


def test_the_audit_topic_can_be_read_by_act_and_time(tmp_path: Path) -> None:
    draftloop("promote", "9", "work=w", "--by", "ana", cwd=tmp_path)
    found = json.loads(draftloop("audit", "work=w", "--act", "champion", "--json", cwd=tmp_path).stdout)["records"]
    assert [(line["act"], line["outcome"], line["by"]) for line in found] == [
        ("champion.promote", "begun", "ana"),
        ("champion.promote", "failed", "ana"),
    ]
    for condition in (("--act", "window"), ("--since", "2999-01-01")):
        assert json.loads(draftloop("audit", "work=w", *condition, "--json", cwd=tmp_path).stdout) == {"records": []}
    assert draftloop("audit", "work=w", "--since", "yesterday", cwd=tmp_path).returncode == 2


def test_doctor_looks_at_what_a_part_needs_and_no_more(tmp_path: Path) -> None:
    found = json.loads(draftloop("doctor", "work=w", "--as", "hook", "--json", cwd=tmp_path).stdout)["checks"]
    assert [check["check"] for check in found] == ["capture log"]
    assert draftloop("doctor", "--as", "nobody", cwd=tmp_path).returncode == 2

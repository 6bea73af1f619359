"""The launcher: settings it writes are read back equal, what it starts it also ends, and a failed start says why."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from samples import FINGERPRINT, security

from draftloop.pipeline.errors import EngineError, EngineUnreachableError, InputError
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.policy import ConsentPolicy, TenantConsent
from draftloop.pipeline.vllm_config import VllmConfig
from draftloop.pipeline.vllm_server import VllmServer, write_serving
from draftloop.serving_hooks.outbox import CaptureLimits
from draftloop.serving_hooks.vllm.settings import (
    VARIABLE,
    CaptureSettings,
    IdentitySettings,
    SwapSettings,
    load_settings,
)

CONSENT = ConsentPolicy(version='an "odd" version', tenants={"acme.de": TenantConsent(sample_rate=0.5)})


def server(folder: Path, body: str, **settings: float) -> VllmServer:
    """A launcher whose Python is a script: it is told to be vLLM and does what `body` says."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    config = VllmConfig(python=python, **settings)  # type: ignore[arg-type]
    return VllmServer(config, folder / "logs", target=Path("/models/m"), dtype="float32", drafter=None)


def test_what_is_written_is_what_the_plug_in_reads(tmp_path: Path) -> None:
    kafka = KafkaConfig(bootstrap=("b:9092",), security=security())
    swap = SwapSettings(staging=tmp_path / "drafters", public_key=tmp_path / "key.pub", max_drafter_bytes=10)
    capture = CaptureSettings(topic="draftloop.raw.m", kafka=kafka, limits=CaptureLimits(max_records=7))
    identity = IdentitySettings(default_tenant="acme.de", api_keys={"ab" * 32: "x"})
    files = write_serving(
        tmp_path / "serving", FINGERPRINT, consent=CONSENT, capture=capture, identity=identity, swap=swap
    )
    found = load_settings({VARIABLE: str(files.settings)})
    assert found is not None
    assert found.fingerprint() == FINGERPRINT
    assert (found.consent, found.capture) == (CONSENT, capture)
    assert found.identity == identity.model_copy(update={"gateway_secret_file": files.gateway_secret})
    assert found.swap == swap.model_copy(update={"token_file": files.token})


def test_secrets_are_for_their_owner_alone_and_stay_when_the_files_are_written_anew(tmp_path: Path) -> None:
    first = write_serving(tmp_path / "serving", FINGERPRINT, consent=CONSENT)
    token = first.token.read_text()
    assert write_serving(tmp_path / "serving", FINGERPRINT, consent=CONSENT) == first
    assert first.token.read_text() == token != first.gateway_secret.read_text()
    assert len(token) >= 32
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (first.token, first.gateway_secret, tmp_path / "serving")]
    assert modes == [0o600, 0o600, 0o700]


def test_no_engine_is_named_with_how_to_get_one(tmp_path: Path) -> None:
    config = VllmConfig(python=tmp_path / "none")
    with pytest.raises(InputError, match="no engine at") as caught:
        VllmServer(config, tmp_path, target=Path("m"), dtype="float32", drafter=None)
    assert "make engine" in str(caught.value.mend)


def test_a_server_that_ends_while_it_starts_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    made = server(tmp_path, "echo 'ValueError: no such model'; exit 3")
    with pytest.raises(EngineError, match=r"exit 3\)[^$]*ValueError: no such model"):
        made.start()
    assert not made.is_running()


def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    made = server(tmp_path, "echo loading; sleep 100", start_timeout_s=1.0)
    waited: list[float] = []
    with pytest.raises(EngineUnreachableError, match=r"did not answer in [1-9] s[^$]*loading"):
        made.start(waited.append)
    assert waited
    assert (made.is_running(), made.processes()) == (False, {})


def test_all_of_its_processes_end_with_it_even_those_that_ignore_a_polite_word(tmp_path: Path) -> None:
    made = server(tmp_path, "trap '' TERM; (trap '' TERM; sleep 100) & sleep 100 & wait; sleep 100")
    made.spawn()
    deadline = time.monotonic() + 10
    while len(made.processes()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = list(made.processes())
    assert len(pids) >= 3
    assert made.rss_mb() > 0
    made.stop(timeout_s=0.5)
    assert made.processes() == {}
    assert not [pid for pid in pids if _lives(pid)]
    made.stop()  # twice is once


def test_a_started_server_is_not_started_again(tmp_path: Path) -> None:
    made = server(tmp_path, "sleep 100")
    made.spawn()
    with pytest.raises(EngineError, match="runs already"):
        made.spawn()
    made.kill()
    assert not made.is_running()


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """vLLM itself is stood in for by a module of its name; everything else is as it runs."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    site = tmp_path / "python"
    site.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    site.chmod(0o755)
    code = (
        "import sys, time; from pathlib import Path; from draftloop.pipeline.vllm_config import VllmConfig;"
        "from draftloop.pipeline.vllm_server import VllmServer; f = Path(sys.argv[1]);"
        "VllmServer(VllmConfig(python=f / 'python'), f, target=f, dtype='float32', drafter=None).spawn();"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
        assert _lives(pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 10
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_would_change_the_server_is_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONWARNINGS", "OMP_NUM_THREADS", VARIABLE):
        monkeypatch.setenv(name, "odd")
    made = server(tmp_path, f"env > {tmp_path}/env; sleep 100")
    made.spawn()
    written = tmp_path / "env"
    deadline = time.monotonic() + 10
    while (not written.exists() or "VLLM_PLUGINS" not in written.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    made.kill()
    seen = dict(line.split("=", 1) for line in written.read_text().splitlines() if "=" in line)
    assert not {"PYTHONPATH", "PYTHONWARNINGS", "OMP_NUM_THREADS", VARIABLE} & seen.keys()
    assert (seen["VLLM_PLUGINS"], seen["PYTHONSAFEPATH"], seen["PATH"]) == ("draftloop", "1", os.environ["PATH"])

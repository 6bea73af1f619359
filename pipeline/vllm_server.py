"""A vLLM server on this machine, in its own environment: what the demo, the benches and the engine tests stand on.

It runs in a process group of its own and ends with the thread that started it, however that ends: none is ever left
behind. Nothing here imports vLLM.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import EngineError, EngineUnreachableError, InputError, StorageError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.stream.policy import ConsentPolicy
from draftloop.pipeline.stream.private_files import make_private, write_private
from draftloop.pipeline.vllm_config import VllmConfig
from draftloop.serving_hooks.vllm.settings import (
    VARIABLE,
    CaptureSettings,
    IdentitySettings,
    ServingSettings,
    SwapSettings,
)

MODEL_NAME = "target"  # as clients of the server call it
TAIL_LINES = 25

# What is set for the server alone; what of our own environment would change it is taken away.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONSAFEPATH": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # the cores are shared with the trainer: no thread spins for work
    "VLLM_PLUGINS": "draftloop",
}
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "OMP_NUM_THREADS")

# The server asks the kernel to end it with whoever started it (PR_SET_PDEATHSIG), then becomes vLLM.
_ENDS_WITH_US = (
    "import ctypes,os,signal,sys;"
    "ctypes.CDLL(None).prctl(1,signal.SIGTERM);"
    "os.execv(sys.executable,[sys.executable,'-m','vllm.entrypoints.openai.api_server',*sys.argv[1:]])"
)


@dataclass(frozen=True)
class ServingFiles:
    """What the plug-in and those who call it need, in one private folder."""

    settings: Path  # serving.toml
    fingerprint: Path
    token: Path  # of the admin route
    gateway_secret: Path


def write_serving(
    folder: Path,
    fingerprint: Fingerprint,
    *,
    consent: ConsentPolicy,
    capture: CaptureSettings | None = None,
    identity: IdentitySettings | None = None,
    swap: SwapSettings | None = None,
) -> ServingFiles:
    """Write serving.toml, the fingerprint, and (once) admin token and gateway secret into `folder`, made ours alone.

    The places of token and secret are filled in. Raises StorageError.
    """
    folder = folder.absolute()
    files = ServingFiles(
        folder / "serving.toml", folder / "fingerprint.json", folder / "admin.token", folder / "gateway.secret"
    )
    settings = ServingSettings(
        target=files.fingerprint,
        consent=consent,
        capture=capture or CaptureSettings(),
        identity=(identity or IdentitySettings()).model_copy(update={"gateway_secret_file": files.gateway_secret}),
        swap=(swap or SwapSettings()).model_copy(update={"token_file": files.token}),
    )
    try:
        make_private(folder)
        for secret in (files.token, files.gateway_secret):
            if not secret.exists():
                write_private(secret, secrets.token_urlsafe(32).encode())
        artifact.write_json(files.fingerprint, fingerprint.to_dict())
        write_private(files.settings, to_toml(settings).encode())
    except OSError as error:
        raise StorageError(
            f"cannot write {folder}: {error}", mend="free disk space or fix the folder's rights"
        ) from None
    return files


def to_toml(settings: ServingSettings) -> str:
    """The settings as the plug-in reads them, defaults left out."""
    values = settings.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {_toml(value)}" for key, value in values.items() if key not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """JSON's strings, numbers, booleans and lists are TOML's too; tables go on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


class VllmServer:
    """One server: start() and stop(), or a context manager. `url`, `log` and `port` stay the same over restarts."""

    def __init__(
        self,
        config: VllmConfig,
        folder: Path,
        *,
        target: Path,
        dtype: str,
        drafter: Path | None,
        num_speculative_tokens: int = 4,
        method: str = "eagle3",
        serving: Path | None = None,
    ) -> None:
        """folder: for its log. drafter: None serves without speculation. serving: the plug-in's TOML; None: plain vLLM.

        Raises InputError where there is no such Python.
        """
        python = config.python.absolute()
        if not python.exists():
            raise InputError(f"no engine at {python}", mend="make engine, or set vllm.python to one that holds vLLM")
        self.port = config.port or _free_port(config.host)
        self.url = f"http://{config.host}:{self.port}"
        self.log = folder / f"vllm-{self.port}.log"
        self._config = config
        self._command = [
            str(python),
            "-c",
            _ENDS_WITH_US,
            *_flags(config, self.port, target, dtype),
            *_speculation(drafter, num_speculative_tokens, method),
            *config.extra_args,
        ]
        self._environment = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
        self._environment |= {**_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": f"{config.kv_cache_gib:g}"}
        self._environment.pop(VARIABLE, None)
        if serving is not None:
            self._environment[VARIABLE] = str(serving.absolute())
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, on_wait: Callable[[float], None] | None = None) -> None:
        """Start it and wait until it answers. Raises EngineError (it ended), EngineUnreachableError (time is up)."""
        self.spawn()
        self.wait(on_wait)

    def spawn(self) -> None:
        """Start it without waiting. It ends with the calling thread. Raises EngineError if it runs already."""
        if self.is_running():
            raise EngineError(f"the server at {self.url} runs already", mend="stop it first")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, on_wait: Callable[[float], None] | None = None) -> None:
        """Wait until a spawned server answers; on_wait gets the seconds so far. Raises as `start`, and ends it then."""
        began = time.monotonic()
        try:
            while not self.answers():
                seconds = time.monotonic() - began
                if not self.is_running():
                    raise EngineError(
                        f"vLLM ended while it started (exit {self._exit()}); the end of {self.log}:\n{self.tail()}",
                        mend="its own message says what it missed; the engine environment is made by `make engine`",
                    )
                if seconds > self._config.start_timeout_s:
                    raise EngineUnreachableError(
                        f"vLLM at {self.url} did not answer in {seconds:.0f} s; the end of {self.log}:\n{self.tail()}",
                        mend="raise vllm.start_timeout_s, or free the machine",
                    )
                if on_wait is not None:
                    on_wait(seconds)
                time.sleep(0.5)
        except BaseException:
            self.stop(timeout_s=0)
            raise

    def answers(self) -> bool:
        """Whether vLLM's own /health says yes."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def is_running(self) -> bool:
        """Whether its first process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the API server; also the process group's. Raises EngineError where none was started."""
        if self._process is None:
            raise EngineError(f"no server was started at {self.url}", mend="call start()")
        return self._process.pid

    def processes(self) -> dict[int, str]:
        """pid -> name of every living process of its group."""
        return _group(self._process.pid) if self._process is not None else {}

    def rss_mb(self) -> float:
        """Resident memory of all its processes, MB."""
        return sum(_rss_mb(pid) for pid in self.processes())

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    def stop(self, timeout_s: float = 20.0) -> None:
        """End it: politely, so that it delivers what it captured, then the whole group by force. Twice is once."""
        process = self._process
        if process is None:
            return
        if process.poll() is None and timeout_s > 0:
            process.terminate()  # the API server ends its own workers
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        for _ in range(100):
            if process.poll() is not None and not _group(process.pid):
                break
            _kill_group(process.pid)
            time.sleep(0.05)
        self._process = None

    def kill(self) -> None:
        """End the whole group at once, as a crash would."""
        self.stop(timeout_s=0)

    def _exit(self) -> int | None:
        return self._process.poll() if self._process is not None else None


def _flags(config: VllmConfig, port: int, target: Path, dtype: str) -> list[str]:
    flags = {
        "--model": str(target),
        "--served-model-name": MODEL_NAME,
        "--host": config.host,
        "--port": str(port),
        "--dtype": dtype if config.dtype == "auto" else config.dtype,
        "--max-model-len": str(config.max_model_len),
        "--max-num-seqs": str(config.max_num_seqs),
    }
    flat = [part for flag in flags.items() for part in flag]
    return [*flat, *(["--enforce-eager"] if config.enforce_eager else [])]


def _speculation(drafter: Path | None, num_speculative_tokens: int, method: str) -> list[str]:
    if drafter is None:
        return []
    speculative: Mapping[str, object] = {
        "method": method,
        "model": str(drafter.absolute()),  # a link stays one: it is followed at each start
        "num_speculative_tokens": num_speculative_tokens,
    }
    return [
        "--speculative-config",
        json.dumps(speculative),
        "--weight-transfer-config",
        json.dumps({"backend": "draft_disk"}),
        "--per-request-spec-decode-metrics",
        "detailed",
    ]


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _group(leader: int) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            status = _stat(entry)
            if status is not None and status[1] == leader and status[2] != "Z":
                found[int(entry.name)] = status[0]
    return found


def _stat(entry: Path) -> tuple[str, int, str] | None:
    """Name, process group and state."""
    try:
        text = (entry / "stat").read_text(errors="replace")
    except OSError:  # it has just ended
        return None
    name, _, rest = text[text.index("(") + 1 :].rpartition(")")
    fields = rest.split()
    return name, int(fields[2]), fields[0]


def _rss_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def request_json(
    url: str, body: object = None, *, headers: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> tuple[int, Any]:
    """GET, or POST of a JSON body: (status, JSON or text of the answer), whatever the status. Raises OSError."""
    data = None if body is None else msgspec.json.encode(body)
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return int(answer.status), _decoded(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _decoded(error.read())


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw.decode(errors="replace")

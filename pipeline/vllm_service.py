"""A vLLM server as the demo's engine: traffic over HTTP as a gateway sends it, capture by the plug-in in the server."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from draftloop.pipeline.completions import Answer, Completions, streaming
from draftloop.pipeline.engine_files import make_first_drafter
from draftloop.pipeline.errors import ConfigError, EngineError, InputError
from draftloop.pipeline.records import Swapped
from draftloop.pipeline.rollout.engine_client import EngineClient
from draftloop.pipeline.rollout.journal import BOOT, Journal
from draftloop.pipeline.rollout.vllm_client import VllmClient
from draftloop.pipeline.service import FLUSH_S, Counted, HookLog, UnderLoad
from draftloop.pipeline.vllm_server import MODEL_NAME, ServingFiles, VllmServer, request_json, write_serving
from draftloop.serving_hooks.embedded.types import Completion, Request
from draftloop.serving_hooks.vllm.settings import CaptureSettings, SwapSettings

if TYPE_CHECKING:
    from draftloop.pipeline.config import Config
    from draftloop.pipeline.workspace import Workspace
    from draftloop.trainers.target import Target

STREAMS_UNDER_LOAD = 8


def gateway_headers(request: Request, secret: str) -> dict[str, str]:
    """What a trusted gateway says of a request."""
    named = {
        "gateway-secret": secret,
        "tenant": request.tenant,
        "subject": request.subject,
        "conversation": request.conversation_id,
        "slices": ",".join(f"{key}={value}" for key, value in sorted(request.slices.items())),
    }
    return {f"x-draftloop-{name}": value for name, value in named.items() if value}


class VllmService:
    """The server of a work folder: it boots with what the agent proved last, on day 0 with an untrained drafter."""

    def __init__(self, workspace: Workspace, target: Target, log: HookLog) -> None:
        """Raises InputError where there is no engine environment."""
        self._workspace, self._target = workspace, target
        self._folder = workspace.root / "engine"

        self._files = _serving_files(workspace, target, log, self._folder)
        self._server = self._make_server(drafter=workspace.staging / "live", serving=self._files)
        self._completions = self._client_of(self._server, self._files)
        self._client = VllmClient(self._server.url, self._files.token)
        self._captured: dict[str, int] = {}

    @property
    def client(self) -> EngineClient:
        return self._client

    @property
    def server(self) -> VllmServer:
        return self._server

    def start(self, say: Callable[[str], None]) -> None:
        """Make the first drafter where there is none, start the server, and check what it boots with.

        Raises EngineError, EngineUnreachableError.
        """
        journal = Journal(self._workspace.staging)
        if journal.live_version() is None:
            make_first_drafter(self._workspace, journal.drafters / BOOT, self._target)
        began = time.monotonic()
        say(f"a vLLM server starts, log {self._server.log}")
        self._server.start()
        wait_until_known(self._client)
        say(f"vLLM answers at {self._server.url} after {time.monotonic() - began:.0f} s")

    def stop(self) -> None:
        self._completions.close()
        self._server.stop()

    def restart(self) -> float:
        """Stop it and start it again; seconds until it answered."""
        self.flush()
        self._server.stop()
        began = time.monotonic()
        self._server.start()
        seconds = time.monotonic() - began
        wait_until_known(self._client)
        return seconds

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        version = self._client.drafter_version()
        return [completion_of(answer, version) for answer in self._completions.run(requests)]

    @contextmanager
    def under_load(self, requests: Sequence[Request]) -> Iterator[UnderLoad]:
        load = UnderLoad()
        version = self._client.drafter_version()
        with streaming(self._completions, requests, streams=STREAMS_UNDER_LOAD) as streamed:
            yield load
        if streamed.failures:
            raise streamed.failures[0]
        load.completions += [completion_of(answer, version) for answer in streamed.answers]

    def hang_up(self, request: Request) -> None:
        leaving = replace(request, request_id=f"left-{request.request_id}")
        self._completions.ask(leaving, stream=True, hang_up_after=1)

    def flush(self) -> None:
        deadline = time.monotonic() + FLUSH_S
        while True:
            capture = self._client.status()["capture"]
            self._captured = capture["counters"] or self._captured
            if not self._captured.get("in_queue") or time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def captured(self) -> dict[str, int]:
        self.flush()
        return self._captured

    def counted(self) -> Counted:
        return read_counted(self._server)

    @contextmanager
    def speed(self) -> Iterator[TwoServers]:
        plain = self._make_server(drafter=None, serving=None)
        with plain:
            client = self._client_of(plain, None)
            try:
                yield TwoServers(self._completions, client)
            finally:
                client.close()

    def _make_server(self, *, drafter: Path | None, serving: ServingFiles | None) -> VllmServer:
        config = self._workspace.config
        return VllmServer(
            config.vllm if drafter is not None else config.vllm.model_copy(update={"port": 0}),
            self._folder,
            target=Path(self._target.folder),
            dtype=self._target.fingerprint.dtype,
            drafter=drafter,
            num_speculative_tokens=config.replay.num_speculative_tokens,
            serving=serving.settings if serving is not None else None,
        )

    def _client_of(self, server: VllmServer, files: ServingFiles | None) -> Completions:
        secret = files.gateway_secret.read_text().strip() if files is not None else ""

        def headers(request: Request) -> dict[str, str]:
            return gateway_headers(request, secret) if secret else {}

        streams = self._workspace.config.vllm.max_num_seqs
        return Completions(server.url, MODEL_NAME, streams=streams, headers_of=headers)


class TwoServers:
    """One server with a drafter and one without, taken in turns: the one that is not asked costs nothing."""

    def __init__(self, drafting: Completions, plain: Completions) -> None:
        self._arms = {True: drafting, False: plain}
        self._drafting = True

    def swap(self, folder: Path | None, version: str | None) -> Swapped:
        """Turn to the server with the drafter, or (None) to the one without."""
        self._drafting = folder is not None
        return Swapped("", 0.0)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        answers = self._arms[self._drafting].run(requests, stream=lambda index: False)
        return [completion_of(answer, None) for answer in answers]


def wait_until_known(client: VllmClient, timeout_s: float = 120.0) -> None:
    """The plug-in gets to know the drafter of a fresh server while requests run already: wait until it does.

    Raises EngineError naming what is in its way.
    """
    deadline = time.monotonic() + timeout_s
    while client.drafter_version() is None:
        trouble = client.status()["trouble"]
        if trouble is not None or time.monotonic() > deadline:
            told = trouble["message"] if trouble else f"nothing after {timeout_s:.0f} s"
            raise EngineError(f"the server does not know its drafter: {told}", mend="see its log")
        time.sleep(0.1)


def completion_of(answer: Answer, version: str | None) -> Completion:
    """An answer as the embedded engine would give it."""
    reason = answer.finish_reason
    return Completion(
        request_id=answer.request_id,
        prompt_ids=answer.prompt_ids,
        output_ids=answer.output_ids,
        finish_reason="stop" if reason == "stop" else "length" if reason == "length" else "abort",
        accepted=answer.accepted,
        drafted=answer.drafted,
        drafter_version=version,
        logprobs=None,
    )


def read_counted(server: VllmServer) -> Counted:
    """vLLM's own counters of a running server. Raises EngineError where it shows none."""
    values = metrics_of(server)
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    try:
        return Counted(*(int(values[f"vllm:spec_decode_{name}_total"]) for name in names))
    except KeyError as error:
        raise EngineError(f"{server.url}/metrics has no {error}", mend="start it with a drafter") from None


def metrics_of(server: VllmServer) -> dict[str, float]:
    """Name -> value of what the server exports, labels left out, series of one name added up."""
    _, text = request_json(f"{server.url}/metrics")
    found: dict[str, float] = {}
    for line in str(text).splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def _serving_files(workspace: Workspace, target: Target, log: HookLog, folder: Path) -> ServingFiles:
    from draftloop.pipeline.judge.verdict import public_key_path

    config, root = workspace.config, workspace.root.absolute()
    workspace.signing_key()  # its public half is what the server trusts
    workspace.open_log().close()  # the server writes into topics that are there
    capture = CaptureSettings(
        topic=workspace.raw_topic(),
        sqlite=None if log.kafka is not None else root / "capture.db",
        kafka=log.kafka,
        limits=config.capture,
    )
    agent = workspace.staging.absolute()
    swap = SwapSettings(
        staging=agent / "drafters",
        public_key=public_key_path(root / "gate.key"),
        audit_file=agent / "engine-audit.jsonl",
    )
    return write_serving(folder, target.fingerprint, consent=config.consent, capture=capture, swap=swap)


def require_engine(config: Config) -> None:
    """Raise InputError where there is no engine environment, ConfigError where it lacks the client of the log."""
    python = config.vllm.python
    if not python.exists():
        raise InputError(f"no engine at {python}", mend="make engine, or set vllm.python to one that holds vLLM")
    if config.log.kind != "kafka":
        return
    found = subprocess.run([str(python.absolute()), "-c", "import kafka"], capture_output=True, check=False, cwd="/")
    if found.returncode:
        raise ConfigError(
            f"log.kind = kafka: the engine environment of {python} has no Kafka client",
            mend=f"{python} -m pip install 'draftloop[kafka]' (from a checkout: '.[kafka]'), or log=sqlite",
        )

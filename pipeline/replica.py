"""The agent as a command: it stands beside one vLLM replica and follows the champion until it is told to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from draftloop.pipeline.data.prompts import DOMAINS, prompts
from draftloop.pipeline.errors import ConfigError, DraftloopError, LeaseHeldError
from draftloop.pipeline.rollout.agent import Agent
from draftloop.pipeline.rollout.outcome import Outcome
from draftloop.pipeline.rollout.vllm_client import VllmClient
from draftloop.pipeline.signature import check, load_public_key
from draftloop.pipeline.workspace import Workspace

_PROMPTS_A_DOMAIN = 4


class _Canary(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    ids: tuple[int, ...] | None = None


def token_file(workspace: Workspace) -> Path:
    """Where the replica's admin token lies."""
    return workspace.config.replica.token_file or workspace.root / "serving" / "admin.token"


def canary_prompts(
    file: Path | None, tokenize: Callable[[Sequence[str]], list[tuple[int, ...]]]
) -> list[Sequence[int]]:
    """Token ids of the prompts that prove a swap: the file's, or the project's own as plain texts.

    Raises ConfigError naming the line.
    """
    if file is None:
        texts = [text for domain in DOMAINS for text in prompts(domain)[:_PROMPTS_A_DOMAIN]]
        return list(tokenize(texts))
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"agent.canary_file = {file}: {error.strerror}", mend="name a file of JSON lines") from error
    found: list[Sequence[int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            canary = msgspec.json.decode(line, type=_Canary)
        except (msgspec.DecodeError, UnicodeDecodeError):
            canary = _Canary()
        if bool(canary.prompt) == bool(canary.ids):
            raise ConfigError(
                f"{file}, line {number}: no canary prompt", mend='write {"prompt": "text"} or {"ids": [1, 2]}'
            )
        found.append(canary.ids or tokenize([canary.prompt or ""])[0])
    if not found:
        raise ConfigError(f"{file} holds no canary prompts", mend='write a line {"prompt": "text"}')
    return found


class Replica:
    """One replica's client and agent. The agent is made at the first pass at which the engine answers."""

    def __init__(self, workspace: Workspace) -> None:
        """Raises ConfigError for an address that is none, or no public key."""
        config = workspace.config
        self._workspace = workspace
        self._client = VllmClient(config.replica.url, token_file(workspace))
        self._key = load_public_key(config.replica.public_key or workspace.root / "gate.key.pub")
        self._agent: Agent | None = None

    def one_pass(self) -> Outcome:
        """Raises as `Agent.reconcile`."""
        if self._agent is None:
            self._agent = self._make()
        return self._agent.reconcile()

    def _make(self) -> Agent:
        workspace = self._workspace
        config = workspace.config.agent

        def check_verdict(document: dict[str, Any], digest: str, fingerprint_digest: str) -> None:
            check(document, self._key, digest=digest, fingerprint=fingerprint_digest)

        return Agent(
            self._client,
            workspace.open_registry(),
            workspace.staging,
            check_verdict=check_verdict,
            canary_prompts=canary_prompts(config.canary_file, self._client.tokenize),
            config=config,
            audit=workspace.audit(),
        )


def follow(replica: Replica, poll_s: float, *, once: bool, told: Callable[[Outcome | DraftloopError], None]) -> None:
    """Passes until SIGTERM or SIGINT; a pass under way is finished first. What failed is told and tried again.

    With `once` a single pass, whose error is raised. Raises LeaseHeldError while another agent holds the engine.
    """
    if once:
        told(replica.one_pass())
        return
    with _stop_signals() as stop:
        while not stop.is_set():
            try:
                told(replica.one_pass())
            except LeaseHeldError:
                raise
            except DraftloopError as error:
                told(error)
            stop.wait(poll_s)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    kept = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)

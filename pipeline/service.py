"""What the demo asks of an engine that serves its requests, and the embedded engine as one such."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from draftloop.pipeline.rollout.engine_client import EngineClient
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.log import CaptureLog

if TYPE_CHECKING:
    from draftloop.pipeline.judge.speed import SpeedEngine
    from draftloop.pipeline.workspace import Workspace
    from draftloop.serving_hooks.embedded.types import Completion, Request
    from draftloop.trainers.target import Target

# On CPUs a step over more rows costs more: above about eight requests at once drafting loses what it gains.
PLAIN_CONCURRENCY = 32
DRAFTING_CONCURRENCY = 8
FLUSH_S = 30.0


@dataclass(frozen=True)
class HookLog:
    """Where the engine's hook writes."""

    open: Callable[[], CaptureLog]
    kafka: KafkaConfig | None = None  # its login; None: the work folder's SQLite file


class Counted(NamedTuple):
    """vLLM's own counters of speculation. They count what lies past a stop or the length too."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def since(self, before: Counted) -> Counted:
        """The difference to an earlier reading."""
        return Counted(*(new - old for new, old in zip(self, before, strict=True)))

    @property
    def tau(self) -> float:
        """1 + accepted / drafts; 1.0 where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


class UnderLoad:
    """What was served during a block: filled when the block has ended."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []


class Service(Protocol):
    """One running engine."""

    @property
    def client(self) -> EngineClient:
        """The rollout's view of it."""

    def start(self, say: Callable[[str], None]) -> None: ...

    def stop(self) -> None:
        """Deliver what was captured, then end it."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Requests to their end, in order, as many at once as this engine serves best."""

    def under_load(self, requests: Sequence[Request]) -> AbstractContextManager[UnderLoad]:
        """Keep these requests running for the length of the block; all are served to their end."""

    def hang_up(self, request: Request) -> None:
        """A client that goes away before its answer is whole."""

    def flush(self) -> None:
        """Wait until the log has what was captured."""

    def captured(self) -> dict[str, int]:
        """The hook's counters."""

    def counted(self) -> Counted | None:
        """The engine's own counters of speculation, where it has any beside ours."""

    def speed(self) -> AbstractContextManager[SpeedEngine]:
        """The engine with and without its drafter, to be measured."""


class EmbeddedService:
    """The engine in this process, with the hook at its side."""

    def __init__(self, workspace: Workspace, target: Target, log: HookLog) -> None:
        from draftloop.serving_hooks.capture import CaptureHook
        from draftloop.serving_hooks.embedded.engine import EmbeddedEngine

        config = workspace.config
        self._hook = CaptureHook(
            log.open,
            topic=workspace.raw_topic(),
            policy=config.consent,
            target=target.fingerprint.digest,
            limits=config.capture,
        )
        self._engine = EmbeddedEngine(target, config.engine, capture=self._hook)

    @property
    def client(self) -> EngineClient:
        return self._engine

    def start(self, say: Callable[[str], None]) -> None:
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()
        self._hook.close(timeout_s=10)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        drafting = self._engine.drafter_version() is not None
        concurrency = DRAFTING_CONCURRENCY if drafting else PLAIN_CONCURRENCY
        done: list[Completion] = []
        for first in range(0, len(requests), concurrency):
            done += self._engine.generate(requests[first : first + concurrency])
        return done

    @contextmanager
    def under_load(self, requests: Sequence[Request]) -> Iterator[UnderLoad]:
        load = UnderLoad()
        running = [self._engine.submit(request) for request in requests]
        yield load
        load.completions += [future.result(timeout=120) for future in running]

    def hang_up(self, request: Request) -> None:
        leaving = replace(request, request_id=f"left-{request.request_id}")
        running = self._engine.submit(leaving)
        self._engine.cancel(leaving.request_id)
        running.result(timeout=60)

    def flush(self) -> None:
        self._hook.flush(timeout_s=FLUSH_S)

    def captured(self) -> dict[str, int]:
        return self._hook.counters()

    def counted(self) -> Counted | None:
        return None

    @contextmanager
    def speed(self) -> Iterator[SpeedEngine]:
        yield self._engine


def open_service(workspace: Workspace, target: Target, log: HookLog) -> Service:
    """The engine that `engine.kind` names. Raises InputError where there is none."""
    if workspace.config.engine.kind == "vllm":
        from draftloop.pipeline.vllm_service import VllmService

        return VllmService(workspace, target, log)
    return EmbeddedService(workspace, target, log)

"""What the rollout asks of an engine, and the in-memory twin that tests use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from draftloop.pipeline.errors import SwapFailedError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.records import Condition, ProbeResult, SpecCounters, Swapped


class EngineClient(Protocol):
    """One engine replica."""

    def fingerprint(self) -> Fingerprint: ...

    def drafter_version(self) -> str | None: ...

    def condition(self) -> Condition: ...

    def swap(self, folder: Path | None, version: str | None) -> Swapped:
        """Replace the drafter's weights (None: no drafter) between two steps; running requests keep their state.

        The engine goes on whatever happens. Raises CheckpointError, FingerprintMismatchError, SwapRefusedError where
        nothing was touched, SwapFailedError where it was, ReplicaLostError where only a restart helps.
        """

    def probe(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> ProbeResult: ...

    def counters(self) -> SpecCounters: ...


class Generated(msgspec.Struct, frozen=True):
    """Outputs of internal requests, greedy or sampled."""

    output_ids: tuple[tuple[int, ...], ...]
    margins: tuple[tuple[float, ...], ...]  # per token: log-probability of the best minus the second best
    counters: SpecCounters


class Scores(msgspec.Struct, frozen=True):
    """Outputs under the target alone, per output and token."""

    logprobs: tuple[tuple[float, ...], ...]
    ranks: tuple[tuple[int, ...], ...]  # 1: the target's best
    margins: tuple[tuple[float, ...], ...]  # log-probability of the target's best minus this token's


@runtime_checkable
class ProbingEngine(Protocol):
    """An engine that can be asked whether its speculation is lossless: see pipeline/lossless_probe.py."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        speculate: bool = True,
    ) -> Generated:
        """speculate False: token by token, which no drafter has a part in. seed None: other texts each time."""

    def score(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Scores: ...


@dataclass
class FakeEngine:
    """The in-memory twin: says what it is told, counts what it is asked, fails where it is told to."""

    target: Fingerprint
    outputs: tuple[tuple[int, ...], ...] = ((1, 2, 3),)
    tau_of: dict[str | None, float] = field(default_factory=dict)  # version -> tau its probe shows
    digest_of: dict[str | None, str] = field(default_factory=dict)
    fail_loading: set[str | None] = field(default_factory=set)
    version: str | None = None
    pause_ms: float = 40.0
    boot_id: str = "first"
    restart_needed: str | None = None
    calls: list[str] = field(default_factory=list)
    _counters: SpecCounters = field(default_factory=SpecCounters)

    def fingerprint(self) -> Fingerprint:
        return self.target

    def drafter_version(self) -> str | None:
        return self.version

    def condition(self) -> Condition:
        return Condition(self.boot_id, self.version, "", self.digest_of.get(self.version, ""), self.restart_needed)

    def swap(self, folder: Path | None, version: str | None) -> Swapped:
        self.calls.append(f"swap {version}")
        if version in self.fail_loading:
            raise SwapFailedError(f"cannot load {version}")
        self.version = version
        return Swapped(self.digest_of.get(version, ""), self.pause_ms)

    def probe(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> ProbeResult:
        self.calls.append("probe")
        seen = self.serve(num_steps=100)
        return ProbeResult(self.outputs, tuple(tuple(9.0 for _ in ids) for ids in self.outputs), seen)

    def serve(self, *, num_steps: int) -> SpecCounters:
        """Pretend that traffic ran for this many steps with the live drafter."""
        tau = self.tau_of.get(self.version, 1.0)
        emitted = round(num_steps * tau)
        seen = SpecCounters(num_steps, emitted, num_steps * 4, emitted - num_steps)
        before = self._counters
        self._counters = SpecCounters(
            before.num_steps + seen.num_steps,
            before.num_emitted + seen.num_emitted,
            before.num_drafted + seen.num_drafted,
            before.num_accepted + seen.num_accepted,
        )
        return seen

    def counters(self) -> SpecCounters:
        return self._counters

"""What the rollout asks of an engine, and the in-memory twin that tests use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from draftloop.pipeline.errors import SwapFailedError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.records import ProbeResult, SpecCounters, Swapped


class EngineClient(Protocol):
    """One engine replica."""

    def fingerprint(self) -> Fingerprint: ...

    def drafter_version(self) -> str | None: ...

    def swap(self, folder: Path | None, version: str | None) -> Swapped:
        """Replace the drafter's weights (None: no drafter) between two steps; running requests keep their state.

        The engine goes on whatever happens. Raises CheckpointError, FingerprintMismatchError, SwapRefusedError where
        nothing was touched, SwapFailedError where it was, ReplicaLostError where only a restart helps.
        """

    def probe(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> ProbeResult: ...

    def counters(self) -> SpecCounters: ...


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
    calls: list[str] = field(default_factory=list)
    _counters: SpecCounters = field(default_factory=SpecCounters)

    def fingerprint(self) -> Fingerprint:
        return self.target

    def drafter_version(self) -> str | None:
        return self.version

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

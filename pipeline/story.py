"""What the demo has seen so far: the JSON answer, the closing table and the report are drawn from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """tau of the live drafter on held-out requests that it has just answered."""

    engine: float  # by our counters: tokens that users got
    counted: float | None  # by vLLM's own counters
    replayed: float  # by replay of the answers


@dataclass(slots=True)
class Cycle:
    """One retraining and what it brought in one domain."""

    domain: str
    tau_before: float
    tau_after: float
    tau_engine: float  # the live engine's counters on the held-out requests, after the swap
    tau_counted: float | None  # the same by vLLM's own counters, which count past a stop or the length too
    tau_replay_of_engine: float  # replay of the outputs those requests gave
    tau_floor: float  # the n-gram floor on the same held-out requests
    interval: tuple[float, float]  # of the ratio challenger / champion, over all held-out requests
    verdict: str
    reasons: list[str]
    swap_ms: float | None
    outputs_identical: bool | None  # canary outputs before and after the swap; in bf16 up to near ties, listed here:
    near_ties: list[dict[str, Any]] | None  # prompt, position, margin in logits
    by_domain: dict[str, dict[str, float]]  # domain -> tau before and after
    train: dict[str, Any]
    speed: dict[str, Any] | None = None


@dataclass(slots=True)
class Story:
    """What the demo has seen so far; the report is drawn from it."""

    engine: str = "embedded"
    cycles: list[Cycle] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)  # chunks of traffic: domain, tau, version
    positions: dict[str, list[float]] = field(default_factory=dict)  # label -> acceptance by position
    counts: dict[str, Any] = field(default_factory=lambda: {"captured": 0, "kept": 0, "rejected": {}})
    capture: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, Any] = field(default_factory=dict)
    rolled_back: bool = False
    replayed: dict[str, Any] | None = None  # vLLM: captured requests of one drafter, replayed and as they were emitted
    restart: dict[str, Any] | None = None  # vLLM: what a restarted server booted with

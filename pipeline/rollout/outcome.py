"""What one pass of the agent came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftloop.pipeline.rollout.canary import Decision
from draftloop.pipeline.rollout.examine import Ties
from draftloop.pipeline.rollout.journal import State


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one pass did."""

    state: State
    version: str | None  # what the engine serves now
    reason: str
    swap_ms: float | None = None  # pause to resume, of a swap in this pass
    near_ties: Ties | None = None  # canary outputs that differ from before that swap, each at a near tie
    decision: Decision | None = None  # of the watch

    @property
    def outputs_identical(self) -> bool | None:
        """Whether the canary outputs are those from before the swap, token by token; None without a swap."""
        return None if self.near_ties is None else not self.near_ties

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        ties = None if self.near_ties is None else [tie._asdict() for tie in self.near_ties]
        return {
            "state": self.state,
            "version": self.version,
            "reason": self.reason,
            "swap_ms": self.swap_ms,
            "outputs_identical": self.outputs_identical,
            "near_ties": ties,
            "decision": self.decision,
        }

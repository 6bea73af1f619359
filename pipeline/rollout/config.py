"""Settings of the agent. Pydantic only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftloop.pipeline.rollout.canary import CanaryConfig


class AgentConfig(BaseModel):
    """How a drafter enters the engine and what takes it out again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    canary: CanaryConfig = CanaryConfig()
    canary_file: Path | None = None  # JSON lines {"prompt": text} or {"ids": [...]}; None: the project's own prompts
    probe_tokens: int = Field(default=16, ge=1)  # output tokens of each canary prompt
    tie_margin: float = Field(
        default=0.5, ge=0
    )  # logits: a best token leading by less may change with the batch's shape
    # Whether sampled outputs keep the target's distribution, asked around each swap of an engine that can be asked.
    # report: an engine that fails before the swap too is told of; refuse: it gets no drafter.
    sampling_check: Literal["report", "refuse", "off"] = "report"
    sampling_pairs: int = Field(default=12, ge=11)  # texts a side
    sampling_tokens: int = Field(default=16, ge=4)  # a text
    keep_staged: int = Field(default=3, ge=2)  # drafter folders kept
    max_interruptions: int = Field(default=2, ge=1)  # so many swaps of a version cut off: it is refused
    metrics_file: Path | None = None  # Prometheus text, for a textfile collector
    poll_s: float = Field(default=10.0, gt=0)  # `draftloop agent`: between two passes

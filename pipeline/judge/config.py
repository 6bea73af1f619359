"""Settings of the gate. Pydantic only: the command line reads this without importing numpy."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GateConfig(BaseModel):
    """When a challenger is good enough."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    margin: float = Field(default=0.01, ge=0, lt=1)  # tau must be shown to rise by more than this
    confidence: float = Field(default=0.95, gt=0.5, lt=1)  # two-sided: an equal drafter passes at most (1 - this) / 2
    slice_key: str = "domain"
    slice_tolerance: float = Field(default=0.03, ge=0, lt=1)  # a slice may lose this much
    slice_min_conversations: int = Field(default=8, ge=2)  # smaller slices are reported, not judged
    min_conversations: int = Field(default=30, ge=2)
    min_tokens: int = Field(default=1000, ge=1)
    min_speedup: float = Field(default=1.0, gt=0)  # of a measured batch size, against no drafter
    num_resamples: int = Field(default=2000, ge=100)

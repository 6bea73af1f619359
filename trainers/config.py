"""Settings of a training run. Pydantic only: the command line reads this without importing torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainConfig(BaseModel):
    """How a drafter is trained. Defaults suit a first drafter of a small target on CPU."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["eagle3"] = "eagle3"
    draft_vocab_size: int = Field(default=8192, ge=1)
    tap_layers: tuple[int, ...] | None = None  # hidden states entering these layers; None: 2, L//2, L-3
    ttt_steps: int = Field(default=4, ge=1, le=16)
    ttt_decay: float = Field(default=0.8, gt=0, le=1)
    epochs: float = Field(default=3, gt=0)
    tokens_per_batch: int = Field(default=256, ge=16)  # positions per forward, prompts included
    learning_rate: float = Field(default=2e-3, gt=0)
    warm_learning_rate: float = Field(default=1e-3, gt=0)  # with a parent drafter
    warmup_fraction: float = Field(default=0.04, ge=0, lt=1)
    final_lr_fraction: float = Field(default=0.05, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    grad_clip: float = Field(default=1.0, gt=0)
    train_lm_head: bool = False  # frozen: a slice of the target's head
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the matrix products; parameters and moments are fp32
    checkpoint_every_steps: int = Field(default=200, ge=1)
    heldout_every_steps: int = Field(default=0, ge=0)  # 0: once an epoch
    seed: int = 0
    launcher: Literal["inprocess", "torchrun"] = "inprocess"
    num_processes: int = Field(default=1, ge=1)
    deepspeed: Path | None = None  # a DeepSpeed JSON; None: no DeepSpeed

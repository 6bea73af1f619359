"""The learning rate as a pure function of the step: nothing to save, nothing to restore, nothing to double-count."""

from __future__ import annotations

import math

from draftloop.trainers.config import TrainConfig


def learning_rate(step: int, num_steps: int, config: TrainConfig, *, warm: bool) -> float:
    """Rate of optimizer step `step` (0-based): linear warm-up to the peak, cosine down to final_lr_fraction of it.

    warm: the run starts from a parent drafter and peaks at warm_learning_rate.
    """
    peak = config.warm_learning_rate if warm else config.learning_rate
    warmup = math.ceil(config.warmup_fraction * num_steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    share = (step - warmup) / max(1, num_steps - warmup)
    floor = config.final_lr_fraction
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))

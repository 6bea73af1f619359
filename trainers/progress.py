"""Where a run stands: one counter, the number of optimizer steps done. Everything else is derived from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Plan:
    """The order of a run's documents, a pure function of sizes and seed: the same on every rank and after a resume."""

    sizes: tuple[int, ...]  # positions of each document
    tokens_per_batch: int
    epochs: float
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the documents; at least 1."""
        return max(1, min(len(self.sizes), math.ceil(sum(self.sizes) / self.tokens_per_batch)))

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run; at least 1."""
        return max(1, math.ceil(self.epochs * self.steps_per_epoch))

    def epoch(self, step: int) -> int:
        """The 0-based epoch that step `step` belongs to."""
        return step // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        """Whether, with `step` steps done, an epoch (or the run) has just ended."""
        return step % self.steps_per_epoch == 0 or step == self.num_steps

    def documents(self, step: int) -> list[int]:
        """Document indices of the global batch of step `step` (0-based)."""
        return self._epoch_batches(self.epoch(step))[step % self.steps_per_epoch]

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        """Shuffled documents dealt to batches of nearly equal positions."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.sizes), generator=generator).tolist()
        batches: list[list[int]] = [[] for _ in range(self.steps_per_epoch)]
        share = sum(self.sizes) / self.steps_per_epoch
        done = 0
        for document in order:
            middle = done + self.sizes[document] / 2
            batches[min(int(middle / share), len(batches) - 1)].append(document)
            done += self.sizes[document]
        return batches


@dataclass(frozen=True)
class Progress:
    """What a saved state says beside its tensors."""

    step: int  # optimizer steps done
    num_tokens: int = 0  # supervised output tokens seen, all ranks
    seconds: float = 0.0  # spent training before this process took over
    history: tuple[dict[str, float], ...] = field(default_factory=tuple)

"""The training loop over one engine: held-out tau, saved states, and no step on a bad gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftloop.pipeline.errors import NonFiniteError
from draftloop.trainers.batches import Batch, Document, collate
from draftloop.trainers.config import TrainConfig
from draftloop.trainers.engines import TrainEngine
from draftloop.trainers.features import FeatureStore
from draftloop.trainers.heldout import count_walks
from draftloop.trainers.objective import Objective
from draftloop.trainers.progress import Plan, Progress
from draftloop.trainers.schedule import learning_rate
from draftloop.trainers.state import load_state, save_state

FEATURE_BATCH_TOKENS = 4096


class TrainProgress(NamedTuple):
    """One line for a progress bar."""

    step: int
    num_steps: int
    loss: float  # mean over the supervised weight of the last step
    tokens_per_s: float  # supervised output tokens a second, all ranks, since the loop began
    heldout_tau: float | None  # the latest, None before the first
    lr: float


class Documents(NamedTuple):
    """One side of a snapshot with the part of its features that this rank owns."""

    all: Sequence[Document]
    own: Sequence[int]  # indices into `all`, in the store's order
    store: FeatureStore

    def pick(self, indices: Sequence[int]) -> tuple[list[Document], list[int]]:
        """This rank's share of these documents and their places in the store."""
        place = {index: at for at, index in enumerate(self.own)}
        mine = [index for index in indices if index in place]
        return [self.all[index] for index in mine], [place[index] for index in mine]


@dataclass
class Run:
    """A run's fixed parts; the only thing that moves is the progress."""

    config: TrainConfig
    objective: Objective
    engine: TrainEngine
    train: Documents
    heldout: Documents
    plan: Plan
    state: Path
    identity: dict[str, Any]
    warm: bool

    def go(self, on_progress: Callable[[TrainProgress], None] | None = None) -> Progress:
        """Train to the end from the newest complete state. Raises NonFiniteError, CheckpointError, StorageError."""
        progress = load_state(self.state, self.engine, identity=self.identity) or Progress(step=0)
        before, begun, seen = progress.seconds, time.monotonic(), 0
        while progress.step < self.plan.num_steps:
            rate = learning_rate(progress.step, self.plan.num_steps, self.config, warm=self.warm)
            loss, tokens = self._step(progress.step, rate)
            seen += tokens
            now = time.monotonic()
            progress = replace(
                progress,
                step=progress.step + 1,
                num_tokens=progress.num_tokens + tokens,
                seconds=before + now - begun,
            )
            if self._evaluates(progress.step):
                point = {"step": progress.step, "loss": loss, "lr": rate, "heldout_tau": self.heldout_tau()}
                progress = replace(progress, history=(*progress.history, point))
            if on_progress is not None and self.engine.rank == 0:
                tau = progress.history[-1]["heldout_tau"] if progress.history else None
                on_progress(
                    TrainProgress(progress.step, self.plan.num_steps, loss, seen / max(now - begun, 1e-9), tau, rate)
                )
            if progress.step % self.config.checkpoint_every_steps == 0 and progress.step < self.plan.num_steps:
                save_state(self.state, self.engine, progress, identity=self.identity)
        return replace(progress, seconds=before + time.monotonic() - begun)

    def _step(self, step: int, rate: float) -> tuple[float, int]:
        """One optimizer step; (mean loss, supervised tokens), both over all ranks."""
        batch = self.batch(step)
        weight, tokens = self.engine.sum([float(batch.weight.sum()), float((batch.weight[:1] > 0).sum())])
        total = self.engine.loss(batch)
        # Every rank divides by the global weight; the engine averages over ranks, so the mean is undone here.
        norm = self.engine.backward(total * (self.engine.world_size / max(weight, 1e-9)))
        (loss,) = self.engine.sum([float(total.detach())])
        if not (torch.isfinite(torch.tensor([loss, norm])).all()):
            raise NonFiniteError(
                f"step {step + 1} of {self.plan.num_steps}, rank {self.engine.rank}: loss {loss}, "
                f"gradient norm {norm}; the optimizer did not move; records: {', '.join(self._suspects(step))}",
                mend="look at these records, or lower the learning rate; the last complete state is intact",
            )
        if weight > 0:  # nothing to learn anywhere: a step would only decay the moments
            self.engine.step(rate)
        return loss / max(weight, 1e-9), int(tokens)

    def batch(self, step: int) -> Batch:
        """This rank's part of the global batch of one step."""
        return self._collate(self.train, self.plan.documents(step))

    def _collate(self, side: Documents, indices: Sequence[int]) -> Batch:
        documents, places = side.pick(indices)
        return collate(
            documents,
            [side.store[place] for place in places],
            self.objective.model.t2d.cpu(),
            steps=self.config.ttt_steps,
            decay=self.config.ttt_decay,
            device=self.engine.device,
        )

    def _suspects(self, step: int) -> list[str]:
        """Records of this rank's batch whose features are not finite; all of its records where all features are."""
        documents, places = self.train.pick(self.plan.documents(step))
        bad = [
            document.record_id
            for document, place in zip(documents, places, strict=True)
            if not all(bool(part.isfinite().all()) for part in self.train.store[place][:2])
        ]
        return bad or [document.record_id for document in documents]

    def _evaluates(self, step: int) -> bool:
        every = self.config.heldout_every_steps
        return step == self.plan.num_steps or (step % every == 0 if every else self.plan.ends_epoch(step))

    def heldout_tau(self) -> float:
        """Tokens per target step of the present drafter on the held-out side; 1.0 where there is nothing to count."""
        self.objective.eval()
        tokens = steps = 0
        for indices in _groups(self.heldout, self.config.tokens_per_batch):
            documents, _ = self.heldout.pick(indices)
            batch = self._collate(self.heldout, indices)
            own_tokens, own_steps = count_walks(self.objective.drafts(batch), documents, batch)
            tokens, steps = tokens + own_tokens, steps + own_steps
        self.objective.train()
        all_tokens, all_steps = self.engine.sum([float(tokens), float(steps)])
        return all_tokens / all_steps if all_steps else 1.0


def _groups(side: Documents, budget: int) -> list[list[int]]:
    """This rank's documents in groups of at most `budget` positions."""
    groups: list[list[int]] = []
    size = 0
    for index in side.own:
        positions = side.all[index].num_positions
        if not groups or size + positions > budget:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += positions
    return groups

"""A tiny snapshot whose outputs are the tiny target's own greedy answers, and a job over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch

from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.trainers.config import TrainConfig
from draftloop.trainers.train import TrainJob


class TinyRow(NamedTuple):
    """What training reads of a row."""

    record_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    temperature: float = 0.0


class TinySnapshot:
    """The opened-snapshot twin: rows by split and a fingerprint."""

    def __init__(self, fingerprint: Fingerprint, train: list[TinyRow], heldout: list[TinyRow]) -> None:
        self.id = "tiny-snapshot"
        self.fingerprint = fingerprint
        self._rows = {"train": train, "heldout": heldout}

    def rows(self, split: Literal["train", "heldout"]) -> list[TinyRow]:
        """All rows of one side."""
        return self._rows[split]


@torch.no_grad()
def greedy(target: Any, prompt: list[int], count: int) -> list[int]:
    """The target's own next `count` tokens."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1, :131].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="session")
def tiny_snapshot(tiny_target: Any) -> TinySnapshot:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index in range(14):
        prompt = torch.randint(3, 131, (3 + index % 4,), generator=generator).tolist()
        rows.append(TinyRow(f"r{index}", prompt, greedy(tiny_target, prompt, 6 + index % 5)))
    return TinySnapshot(tiny_target.fingerprint, rows[:10], rows[10:])


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., TrainJob]:
    """A job into tmp_path; keyword arguments change the settings or, where the job has that field, the job."""

    def make(**changes: Any) -> TrainJob:
        job = {key: changes.pop(key) for key in list(changes) if key in TrainJob.model_fields}
        settings = {
            "draft_vocab_size": 64,
            "ttt_steps": 3,
            "epochs": 2,
            "tokens_per_batch": 24,
            "learning_rate": 1e-2,
            "dtype": "float32",
            "checkpoint_every_steps": 1000,
        }
        values = {
            "target": "tiny",
            "target_dtype": "float32",
            "snapshot": tmp_path / "snapshot",
            "output": tmp_path / "drafter",
            "state": tmp_path / "state",
            "config": TrainConfig(**{**settings, **changes}),
        }
        return TrainJob(**{**values, **job})

    return make

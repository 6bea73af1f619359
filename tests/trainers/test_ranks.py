"""Ranks under torchrun: two gloo processes, DeepSpeed ZeRO-2 in bf16 from the file we ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftloop.pipeline.data.snapshot import Row, publish_snapshot
from draftloop.pipeline.errors import CheckpointError, ConfigError, FingerprintMismatchError
from draftloop.trainers.checkpoint import open_drafter
from draftloop.trainers.config import TrainConfig
from draftloop.trainers.engines import read_deepspeed
from draftloop.trainers.state import complete_states
from draftloop.trainers.target import Target
from draftloop.trainers.train import TrainJob, TrainProgress, launch, train

FILES = Path(__file__).parents[2] / "configs" / "deepspeed"


@pytest.mark.parametrize("name", ["zero2_bf16.json", "zero1.json"])
def test_shipped_deepspeed_files_are_filled_from_our_settings(name: str) -> None:
    values = read_deepspeed(FILES / name, TrainConfig(grad_clip=0.5))
    assert values["gradient_clipping"] == 0.5
    assert values["train_micro_batch_size_per_gpu"] == values["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"zero_optimization": {"stage": 3}}, "stage"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"scheduler": {}}, "scheduler"),
    ],
)
def test_a_deepspeed_file_that_would_be_ignored_in_part_is_refused(
    tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=named):
        read_deepspeed(tmp_path / "ds.json", TrainConfig())


@pytest.fixture
def job(tiny_target: Any, tiny_snapshot: Any, tmp_path: Path) -> TrainJob:
    """The tiny target and snapshot on disk, as ranks need them."""
    folder = tmp_path / "target"
    tiny_target.model.save_pretrained(folder)
    tiny_target.tokenizer.save_pretrained(folder)
    saved = Target.load(folder, dtype="float32")
    sides = {
        split: [
            Row(row.record_id, row.record_id, row.prompt_ids, row.output_ids, {}, 0.0, [])
            for row in tiny_snapshot.rows(split)
        ]
        for split in ("train", "heldout")
    }
    snapshot = publish_snapshot(
        tmp_path / "snapshots", **sides, rejects=[], fingerprint=saved.fingerprint, source={}, rules={}
    )
    config = TrainConfig(
        draft_vocab_size=64, ttt_steps=3, epochs=3, tokens_per_batch=48, learning_rate=1e-2, dtype="float32",
        launcher="torchrun", num_processes=2,
    )  # fmt: skip
    return TrainJob(
        target=str(folder), target_dtype="float32", snapshot=snapshot.folder, output=tmp_path / "ranks",
        state=tmp_path / "state", config=config,
    )  # fmt: skip


def _alone(job: TrainJob, folder: Path) -> TrainJob:
    config = job.config.model_copy(update={"launcher": "inprocess", "num_processes": 1, "deepspeed": None})
    return job.model_copy(update={"config": config, "output": folder / "alone", "state": folder / "alone-state"})


@pytest.mark.slow
def test_two_ranks_train_the_same_drafter_as_one_process(job: TrainJob, tmp_path: Path) -> None:
    seen: list[TrainProgress] = []
    ranks = launch(job, on_progress=seen.append)
    alone = train(_alone(job, tmp_path))
    assert [point.step for point in seen] == list(range(1, ranks.num_steps + 1))
    assert ranks.num_tokens == alone.num_tokens
    for have, want in zip(ranks.history, alone.history, strict=True):
        assert have["loss"] == pytest.approx(want["loss"], rel=1e-4)
        assert have["lr"] == want["lr"]


@pytest.mark.slow
def test_deepspeed_zero2_bf16_on_two_ranks_learns_like_one_process(job: TrainJob, tmp_path: Path) -> None:
    config = job.config.model_copy(update={"deepspeed": FILES / "zero2_bf16.json", "dtype": "bfloat16"})
    ranks = launch(job.model_copy(update={"config": config}))
    alone = train(_alone(job, tmp_path))
    assert ranks.num_tokens == alone.num_tokens
    assert ranks.history[-1]["loss"] == pytest.approx(alone.history[-1]["loss"], rel=0.05)
    model = open_drafter(ranks.folder, fingerprint=None).model
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    start = open_drafter(alone.folder, fingerprint=None).model
    assert torch.equal(model.d2t, start.d2t)


@pytest.mark.slow
def test_what_a_rank_raises_on_purpose_reaches_the_caller(job: TrainJob) -> None:
    other = job.config.model_copy(update={"tap_layers": (0, 1, 2), "num_processes": 1})
    with pytest.raises(FingerprintMismatchError, match="tap_layers"):
        launch(job.model_copy(update={"config": other}))


@pytest.mark.slow
def test_killed_deepspeed_ranks_resume_to_the_same_bits_and_refuse_another_number_of_ranks(
    job: TrainJob, tmp_path: Path
) -> None:
    config = job.config.model_copy(
        update={
            "deepspeed": FILES / "zero2_bf16.json",
            "dtype": "bfloat16",
            "epochs": 40,
            "checkpoint_every_steps": 5,
            "heldout_every_steps": 1000,
        }
    )
    straight = launch(job.model_copy(update={"config": config}))
    again = job.model_copy(update={"config": config, "output": tmp_path / "again", "state": tmp_path / "again-state"})

    def kill(seen: TrainProgress) -> None:
        if seen.step >= 10:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        launch(again, on_progress=kill)
    saved = int(complete_states(again.state)[-1].name.removeprefix("step-"))
    assert 5 <= saved < straight.num_steps  # the progress line of step 10 comes before its state
    alone = config.model_copy(update={"num_processes": 1})
    with pytest.raises(CheckpointError, match="world_size = 2, this run 1"):
        launch(again.model_copy(update={"config": alone}))
    steps: list[int] = []
    resumed = launch(again, on_progress=lambda seen: steps.append(seen.step))
    assert steps[0] == saved + 1
    first, second = (load_file(result.folder / "model.safetensors") for result in (straight, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)

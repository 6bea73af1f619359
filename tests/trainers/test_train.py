"""A run: restartable at any moment, exact on resume, and never moved by a bad number."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftloop.pipeline.errors import (
    CheckpointError,
    ConfigError,
    EmptySnapshotError,
    FingerprintMismatchError,
    NonFiniteError,
)
from draftloop.trainers import run as run_module
from draftloop.trainers.checkpoint import open_drafter, vocabulary_digest
from draftloop.trainers.engines import PlainEngine
from draftloop.trainers.state import complete_states
from draftloop.trainers.target import Features
from draftloop.trainers.train import TrainJob, TrainProgress, launch, train

MakeJob = Callable[..., TrainJob]


class _StopError(Exception):
    """Ends a run from its progress callback, as a kill would."""


def _stop_at(step: int, rates: list[float]) -> Callable[[TrainProgress], None]:
    def seen(progress: TrainProgress) -> None:
        rates.append(progress.lr)
        if progress.step == step:
            raise _StopError

    return seen


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_run_learns_and_publishes_a_drafter_of_this_target(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob
) -> None:
    seen: list[TrainProgress] = []
    job = make_job(epochs=30)
    result = train(job, target=tiny_target, snapshot=tiny_snapshot, on_progress=seen.append)
    assert seen[-1].loss < 0.7 * seen[0].loss
    assert [point.step for point in seen] == list(range(1, result.num_steps + 1))
    drafter = open_drafter(result.folder, fingerprint=tiny_target.fingerprint)
    assert (drafter.digest, drafter.manifest.snapshot_id) == (result.digest, "tiny-snapshot")
    assert result.heldout_tau >= 1.0
    assert len(result.history) == 30
    supervised = sum(int(drafter.model.t2d[row.output_ids].sum()) for row in tiny_snapshot.rows("train"))
    assert result.num_tokens == 30 * supervised
    assert not list(job.state.glob("*.bin"))
    assert not complete_states(job.state)


def test_training_on_one_conversation_overfits_it_to_full_acceptance(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob
) -> None:
    """The end-to-end check of alignment: features, mask, positions and teacher must all fit to get there."""
    row = tiny_snapshot.rows("train")[3]
    twin = type(tiny_snapshot)(tiny_target.fingerprint, [row], [row])
    result = train(make_job(epochs=400, draft_vocab_size=131, learning_rate=5e-3), target=tiny_target, snapshot=twin)
    tokens, k = len(row.output_ids) - 1, 3
    assert result.heldout_tau == tokens / -(-tokens // (k + 1))


def test_stopped_and_resumed_equals_straight_in_rates_and_every_bit(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob, tmp_path: Path
) -> None:
    settings = {"epochs": 2.5, "checkpoint_every_steps": 4}
    straight_rates: list[float] = []
    straight = train(
        make_job(**settings, output=tmp_path / "a", state=tmp_path / "sa"),
        target=tiny_target,
        snapshot=tiny_snapshot,
        on_progress=_stop_at(-1, straight_rates),
    )
    assert straight.num_steps >= 10
    job, rates = make_job(**settings), []
    with pytest.raises(_StopError):
        train(job, target=tiny_target, snapshot=tiny_snapshot, on_progress=_stop_at(5, rates))
    (state,) = complete_states(job.state)
    moments = load_file(state / "moments.safetensors")
    assert all(moment.any() for name, moment in moments.items() if name.startswith("exp_avg"))
    assert {float(value) for name, value in moments.items() if name.startswith("step/")} == {4.0}
    del rates[4:]  # step 5 was lost with the process; only what step 4 saved counts
    resumed = train(job, target=tiny_target, snapshot=tiny_snapshot, on_progress=_stop_at(-1, rates))
    assert rates == straight_rates
    a, b = _weights(straight.folder), _weights(resumed.folder)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [point["loss"] for point in resumed.history] == [point["loss"] for point in straight.history]
    assert resumed.num_tokens == straight.num_tokens


def test_a_kill_while_saving_leaves_the_state_before_it(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob
) -> None:
    job = make_job(epochs=2, checkpoint_every_steps=2)
    with pytest.raises(_StopError):
        train(job, target=tiny_target, snapshot=tiny_snapshot, on_progress=_stop_at(5, []))
    newest = complete_states(job.state)[-1]
    # As if killed between the weights and the rest: a later folder under a temporary name, and one without a marker.
    partial = job.state / ".step-00000006.partial"
    partial.mkdir()
    shutil.copy(newest / "weights.safetensors", partial)
    torn = job.state / "step-00000006"
    torn.mkdir()
    shutil.copy(newest / "weights.safetensors", torn)
    steps: list[int] = []
    train(job, target=tiny_target, snapshot=tiny_snapshot, on_progress=lambda seen: steps.append(seen.step))
    assert newest.name == "step-00000004"
    assert steps[0] == 5


def test_a_state_of_other_settings_or_another_engine_is_refused(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(checkpoint_every_steps=2)
    with pytest.raises(_StopError):
        train(job, target=tiny_target, snapshot=tiny_snapshot, on_progress=_stop_at(3, []))
    with pytest.raises(CheckpointError, match=r"train\.seed = 0, this run 9"):
        train(make_job(checkpoint_every_steps=2, seed=9), target=tiny_target, snapshot=tiny_snapshot)
    monkeypatch.setattr(PlainEngine, "kind", "other")
    with pytest.raises(CheckpointError, match="engine = 'plain', this run 'other'"):
        train(job, target=tiny_target, snapshot=tiny_snapshot)


def test_a_finished_job_run_again_returns_the_same_drafter_without_training(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob
) -> None:
    job = make_job(epochs=1)
    first = train(job, target=tiny_target, snapshot=tiny_snapshot)
    steps: list[TrainProgress] = []
    assert train(job, target=tiny_target, snapshot=tiny_snapshot, on_progress=steps.append) == first
    assert steps == []
    with pytest.raises(CheckpointError, match="another job"):
        train(make_job(epochs=1, seed=3), target=tiny_target, snapshot=tiny_snapshot)


def test_a_warm_start_keeps_its_parents_vocabulary_and_with_rate_zero_its_weights(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob, tmp_path: Path
) -> None:
    parent = train(make_job(epochs=1, output=tmp_path / "p"), target=tiny_target, snapshot=tiny_snapshot)
    # Another vocabulary size and other outputs: neither may change the map.
    rows = [row._replace(output_ids=[3, 4, 5, 6, 7, 8]) for row in tiny_snapshot.rows("train")]
    later = type(tiny_snapshot)(tiny_target.fingerprint, rows, tiny_snapshot.rows("heldout"))
    later.id = "later"
    job = make_job(
        parent=parent.folder, output=tmp_path / "c", state=tmp_path / "sc", draft_vocab_size=32,
        warm_learning_rate=1e-30, epochs=1,
    )  # fmt: skip
    child = train(job, target=tiny_target, snapshot=later)
    before = open_drafter(parent.folder, fingerprint=None)
    after = open_drafter(child.folder, fingerprint=None)
    assert vocabulary_digest(after.model) == vocabulary_digest(before.model)
    assert after.manifest.parents == [parent.digest]
    old, new = _weights(parent.folder), _weights(child.folder)
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_the_head_is_frozen_unless_asked_for(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob, tmp_path: Path
) -> None:
    frozen = train(make_job(epochs=1), target=tiny_target, snapshot=tiny_snapshot)
    trained = train(
        make_job(epochs=1, train_lm_head=True, output=tmp_path / "t", state=tmp_path / "st"),
        target=tiny_target,
        snapshot=tiny_snapshot,
    )
    model = open_drafter(frozen.folder, fingerprint=None).model
    sliced = tiny_target.head[model.draft_token_ids].bfloat16().float()
    assert torch.equal(model.lm_head.weight, sliced)
    assert not torch.equal(open_drafter(trained.folder, fingerprint=None).model.lm_head.weight, sliced)


def test_a_snapshot_of_another_target_is_refused_before_anything_else(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob
) -> None:
    other = replace(tiny_target.fingerprint, weights_digest="0" * 64)
    foreign = type(tiny_snapshot)(other, tiny_snapshot.rows("train"), [])
    job = make_job()
    with pytest.raises(FingerprintMismatchError, match="weights_digest"):
        train(job, target=tiny_target, snapshot=foreign)
    assert not job.state.exists()


def test_a_snapshot_without_output_tokens_is_refused(tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob) -> None:
    rows = [row._replace(output_ids=[]) for row in tiny_snapshot.rows("train")]
    with pytest.raises(EmptySnapshotError, match="no output token"):
        train(make_job(), target=tiny_target, snapshot=type(tiny_snapshot)(tiny_target.fingerprint, rows, []))


def test_an_infinite_feature_stops_the_run_before_the_step_and_names_the_record(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tiny_snapshot.rows("train")[7]
    marker = torch.tensor([*bad.prompt_ids, *bad.output_ids])
    features = tiny_target.features

    def poisoned(ids: torch.Tensor, mask: torch.Tensor | None = None) -> Features:
        found = features(ids, mask)
        for row, sequence in enumerate(ids):
            if torch.equal(sequence[: len(marker)], marker):
                found.taps[row, 1, 0, 0] = float("inf")
        return found

    monkeypatch.setattr(tiny_target, "features", poisoned)
    job = make_job(epochs=1, checkpoint_every_steps=1)
    seen: list[TrainProgress] = []
    with pytest.raises(NonFiniteError, match=r"rank 0.*records: r7$|rank 0.*records: r7\n") as caught:
        train(job, target=tiny_target, snapshot=tiny_snapshot, on_progress=seen.append)
    assert f"step {len(seen) + 1} of" in caught.value.message
    states = complete_states(job.state)
    if seen:
        weights = load_file(states[-1] / "weights.safetensors")
        assert all(value.isfinite().all() for value in weights.values() if value.is_floating_point())
        assert states[-1].name == f"step-{len(seen):08d}"
    assert not job.output.exists()


def test_a_teacher_choice_nobody_can_propose_everywhere_still_ends_without_nan(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob
) -> None:
    rows = [row._replace(output_ids=[130] * 4) for row in tiny_snapshot.rows("train")[:2]]
    only = type(tiny_snapshot)(tiny_target.fingerprint, rows, rows)
    result = train(make_job(draft_vocab_size=1, epochs=1), target=tiny_target, snapshot=only)
    # One kept token (end of sequence), no supervision at all: weights stay as they began.
    assert result.num_tokens == 0
    assert all(point["loss"] == 0.0 for point in result.history)


def test_five_tap_layers_train_as_three_do(tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob) -> None:
    from draftloop.trainers.target import Target

    four = Target.of(tiny_target.model, tiny_target.tokenizer, folder="t", dtype="float32", tap_layers=(0, 1, 2, 3))
    snapshot = type(tiny_snapshot)(four.fingerprint, tiny_snapshot.rows("train"), tiny_snapshot.rows("heldout"))
    result = train(make_job(epochs=1), target=four, snapshot=snapshot)
    assert open_drafter(result.folder, fingerprint=four.fingerprint).model.fc.weight.shape == (32, 128)


def test_ranks_without_torchrun_are_refused(make_job: MakeJob) -> None:
    with pytest.raises(ConfigError, match="launcher"):
        launch(make_job(num_processes=2))


def test_evaluation_leaves_the_objective_in_training_mode(
    tiny_target: Any, tiny_snapshot: Any, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []
    original = run_module.Run._step

    def watched(self: Any, step: int, rate: float) -> tuple[float, int]:
        modes.append(self.objective.training)
        return original(self, step, rate)

    monkeypatch.setattr(run_module.Run, "_step", watched)
    train(make_job(epochs=2), target=tiny_target, snapshot=tiny_snapshot)
    assert all(modes)

"""Train a drafter: one job in, one published drafter folder out. In this process, or on ranks started by torchrun.

`python -m draftloop.trainers.train JOB.json` is what a rank runs; `launch` starts the ranks and waits for the result.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict

from draftloop.pipeline.artifact import is_complete, write_json
from draftloop.pipeline.errors import CheckpointError, ConfigError, DraftloopError, EmptySnapshotError
from draftloop.pipeline.fingerprint import Fingerprint, require_same
from draftloop.trainers.batches import TokenRow, documents_of
from draftloop.trainers.checkpoint import Drafter, open_drafter, publish_drafter
from draftloop.trainers.config import TrainConfig
from draftloop.trainers.engines import TrainEngine, make_engine
from draftloop.trainers.features import FeatureStore
from draftloop.trainers.objective import Objective
from draftloop.trainers.progress import Plan, Progress
from draftloop.trainers.run import FEATURE_BATCH_TOKENS, Documents, Run, TrainProgress
from draftloop.trainers.start import continued_drafter, first_drafter, teacher_head
from draftloop.trainers.target import Target

__all__ = ["TrainJob", "TrainProgress", "TrainResult", "launch", "train"]


class TrainJob(BaseModel):
    """Everything a run is made from; written to JOB.json for ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str  # folder or hub id
    target_dtype: str = "bfloat16"
    snapshot: Path
    parent: Path | None = None  # a drafter folder to continue from
    output: Path  # the drafter folder to publish
    state: Path  # private to the run: resume states, features
    config: TrainConfig = TrainConfig()


@dataclass(frozen=True)
class TrainResult:
    """What a run published and what it cost."""

    folder: Path
    digest: str
    num_steps: int
    num_tokens: int  # supervised output tokens seen
    seconds: float  # of the loop, all its processes' lives together; features not included
    tokens_per_s: float
    heldout_tau: float
    history: tuple[dict[str, float], ...]


class SnapshotView(Protocol):
    """What training needs of an opened snapshot."""

    @property
    def id(self) -> str: ...
    @property
    def fingerprint(self) -> Fingerprint: ...
    def rows(self, split: Literal["train", "heldout"]) -> Any: ...


def train(
    job: TrainJob,
    *,
    target: Target | None = None,
    on_progress: Callable[[TrainProgress], None] | None = None,
    snapshot: SnapshotView | None = None,
) -> TrainResult:
    """Run a job, in one process or as one rank under torchrun, and publish the drafter. Idempotent and restartable.

    target, snapshot: already opened ones, to spare a second load. Raises FingerprintMismatchError before anything else
    is computed, EmptySnapshotError, CheckpointError, ConfigError, NonFiniteError, StorageError.
    """
    if snapshot is None:
        from draftloop.pipeline.data.snapshot import open_snapshot

        snapshot = open_snapshot(job.snapshot)
    if target is None:
        target = Target.load(job.target, dtype=job.target_dtype, tap_layers=job.config.tap_layers)
    require_same(target.fingerprint, snapshot.fingerprint, expected_of="target", found_of=f"snapshot {snapshot.id}")
    parent = open_drafter(job.parent, fingerprint=target.fingerprint) if job.parent is not None else None
    identity = _identity(job, target, snapshot, parent)
    if is_complete(job.output):
        return _already_there(job, target, identity)
    rows = snapshot.rows("train")
    if not documents_of(rows):
        raise EmptySnapshotError(
            f"snapshot {snapshot.id} has no output token to train on", mend="curate a longer window"
        )
    if parent is None:
        model = first_drafter(target, [row.output_ids for row in rows], job.config)
    else:
        model = continued_drafter(parent, target)
    model.requires_grad_(True)
    model.lm_head.requires_grad_(job.config.train_lm_head)
    objective = Objective(
        model,
        target.embedding,
        teacher_head(target, model.draft_token_ids),
        steps=job.config.ttt_steps,
        dtype=torch.bfloat16 if job.config.dtype == "bfloat16" else torch.float32,
    )
    engine = make_engine(objective, job.config)
    run = _prepare(job, target, engine, objective, (rows, snapshot.rows("heldout")), identity)
    try:
        progress = run.go(on_progress)
    finally:
        run.train.store.remove()
        run.heldout.store.remove()
    if engine.rank == 0:
        parents = [parent.digest, *parent.manifest.parents] if parent is not None else []
        facts = _facts(job, target, progress, identity)
        publish_drafter(
            job.output, model, fingerprint=target.fingerprint, snapshot_id=snapshot.id, parents=parents, training=facts
        )
        for leftover in job.state.glob("*step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    engine.barrier()
    return _already_there(job, target, identity)


def _prepare(
    job: TrainJob,
    target: Target,
    engine: TrainEngine,
    objective: Objective,
    rows: tuple[Sequence[TokenRow], Sequence[TokenRow]],
    identity: dict[str, Any],
) -> Run:
    """Features of this rank's share of both sides, and the run over them."""
    sides: list[Documents] = []
    for name, side in zip(("train", "heldout"), rows, strict=True):
        documents = documents_of(side)
        own = list(range(engine.rank, len(documents), engine.world_size))
        path = job.state / f"features-{name}-{engine.rank}.bin"
        store = FeatureStore(path, [documents[index] for index in own], target, job.config.dtype)
        store.fill(target, batch_tokens=FEATURE_BATCH_TOKENS)
        sides.append(Documents(documents, own, store))
    sizes = tuple(document.num_positions for document in sides[0].all)
    plan = Plan(sizes, job.config.tokens_per_batch, job.config.epochs, job.config.seed)
    return Run(
        config=job.config,
        objective=objective,
        engine=engine,
        train=sides[0],
        heldout=sides[1],
        plan=plan,
        state=job.state,
        identity=identity,
        warm=job.parent is not None,
    )


# How a job is run, not what comes out of it.
_NOT_IDENTITY = {"checkpoint_every_steps", "heldout_every_steps", "launcher", "num_processes", "deepspeed"}


def _identity(job: TrainJob, target: Target, snapshot: SnapshotView, parent: Drafter | None) -> dict[str, Any]:
    """What must be equal for a saved state or a published folder to be this job's."""
    settings = job.config.model_dump(mode="json", exclude=_NOT_IDENTITY)
    return {
        **{f"train.{key}": value for key, value in settings.items()},
        "target": target.fingerprint.digest,
        "snapshot": snapshot.id,
        "parent": parent.digest if parent is not None else None,
    }


def _facts(job: TrainJob, target: Target, progress: Progress, identity: dict[str, Any]) -> dict[str, Any]:
    return {
        "identity": identity,
        "target": job.target,
        "target_architecture": type(target.model).__name__,
        "num_speculative_tokens": job.config.ttt_steps,
        "config": job.config.model_dump(mode="json"),
        "num_steps": progress.step,
        "num_tokens": progress.num_tokens,
        "seconds": progress.seconds,
        "history": list(progress.history),
    }


def _already_there(job: TrainJob, target: Target, identity: dict[str, Any]) -> TrainResult:
    """The result of the published folder. Raises CheckpointError if it is another job's."""
    drafter = open_drafter(job.output, fingerprint=target.fingerprint)
    facts = drafter.manifest.training
    if facts.get("identity") != identity:
        other = [key for key, value in identity.items() if facts.get("identity", {}).get(key) != value]
        raise CheckpointError(
            f"{job.output} already holds the drafter of another job (other {', '.join(other)})",
            mend="choose another output folder",
        )
    seconds, tokens = float(facts["seconds"]), int(facts["num_tokens"])
    return TrainResult(
        folder=job.output,
        digest=drafter.digest,
        num_steps=int(facts["num_steps"]),
        num_tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        heldout_tau=float(facts["history"][-1]["heldout_tau"]),
        history=tuple(facts["history"]),
    )


def launch(
    job: TrainJob,
    *,
    target: Target | None = None,
    on_progress: Callable[[TrainProgress], None] | None = None,
) -> TrainResult:
    """`train` here, or on ranks under torchrun where config.launcher says so; same result, same errors."""
    if job.config.launcher == "torchrun":
        from draftloop.trainers.ranks import run_ranks

        return run_ranks(job, on_progress)
    if job.config.num_processes > 1 or job.config.deepspeed is not None:
        raise ConfigError(
            "train.num_processes or train.deepspeed needs ranks, train.launcher is inprocess",
            mend="set train.launcher = torchrun",
        )
    return train(job, target=target, on_progress=on_progress)


def _main(job_file: str) -> int:
    """A rank's whole life: read the job, train, leave result or error beside the job for `launch`."""
    job = TrainJob.model_validate_json(Path(job_file).read_text())
    lines = job.state / "progress.jsonl"

    def show(seen: TrainProgress) -> None:
        with lines.open("a") as stream:
            stream.write(json.dumps(seen._asdict()) + "\n")

    try:
        result = train(job, on_progress=show)
    except DraftloopError as error:
        kind = type(error).__name__
        write_json(job.state / "error.json", {"type": kind, "message": error.message, "mend": error.mend})
        print(f"{kind}: {error}", file=sys.stderr)
        return error.exit_code
    write_json(job.state / "result.json", {**asdict(result), "folder": str(result.folder)})
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))

"""Ranks of a training job: torchrun as a subprocess, progress and result read from files it leaves in job.state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftloop.pipeline import errors
from draftloop.pipeline.errors import DraftloopError, TrainingError
from draftloop.trainers.run import TrainProgress
from draftloop.trainers.train import TrainJob, TrainResult


def run_ranks(job: TrainJob, on_progress: Callable[[TrainProgress], None] | None) -> TrainResult:
    """Start config.num_processes ranks and follow them to their result. Raises a rank's error, or TrainingError."""
    state = job.state
    state.mkdir(parents=True, exist_ok=True)
    for name in ("result.json", "error.json", "progress.jsonl"):
        (state / name).unlink(missing_ok=True)
    job_file = state / "job.json"
    job_file.write_text(job.model_dump_json())
    with (state / "ranks.log").open("wb") as log:
        process = subprocess.Popen(rank_command(job, job_file), env=_rank_environment(job), stdout=log, stderr=log)
        try:
            _follow(process, state / "progress.jsonl", on_progress)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait()
    if (state / "result.json").is_file() and process.returncode == 0:
        return _result(json.loads((state / "result.json").read_text()))
    raise _error(state, process.returncode)


def rank_command(job: TrainJob, job_file: Path) -> list[str]:
    """The torchrun line of a job on this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={job.config.num_processes}",
        "-m",
        "draftloop.trainers.train",
        str(job_file),
    ]


def _rank_environment(job: TrainJob) -> dict[str, str]:
    """Ours plus what ranks need: our kernels/ must not shadow a library, and DeepSpeed must know it is on a CPU."""
    added = {
        "PYTHONSAFEPATH": "1",
        # Spinning at OpenMP's barriers beside any other busy process cost 3 to 10 times the step time here.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // job.config.num_processes)),
    }
    if not torch.cuda.is_available():
        added["DS_ACCELERATOR"] = "cpu"
    return {**os.environ, **added}


def _follow(process: subprocess.Popen[bytes], lines: Path, on_progress: Callable[[TrainProgress], None] | None) -> None:
    """Hand on every complete progress line until the process ends."""
    read = 0
    while True:
        ended = process.poll() is not None
        if on_progress is not None and lines.is_file():
            with lines.open("rb") as stream:
                stream.seek(read)
                fresh = stream.read()
            whole = fresh[: fresh.rfind(b"\n") + 1]
            read += len(whole)
            for line in whole.splitlines():
                on_progress(TrainProgress(**json.loads(line)))
        if ended:
            return
        time.sleep(0.1)


def _result(values: dict[str, Any]) -> TrainResult:
    return TrainResult(**{**values, "folder": Path(values["folder"]), "history": tuple(values["history"])})


def _error(state: Path, returncode: int) -> DraftloopError:
    """What a rank raised on purpose, or a TrainingError with the end of its log."""
    if (state / "error.json").is_file():
        told = json.loads((state / "error.json").read_text())
        kind = getattr(errors, told["type"], TrainingError)
        raised: DraftloopError = kind(told["message"], mend=told["mend"])
        return raised
    tail = (state / "ranks.log").read_text(errors="replace")[-2000:]
    return TrainingError(f"a training rank ended with code {returncode}: {tail}", mend=f"see {state / 'ranks.log'}")

"""Resume state: folders step-NNNNNNNN under job.state, each whole or not there; the newest complete one counts.

Private to the run (DeepSpeed's part is pickled); what leaves the run is the drafter folder.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftloop.pipeline.artifact import is_complete, publish, verify
from draftloop.pipeline.errors import CheckpointError
from draftloop.trainers.engines import TrainEngine
from draftloop.trainers.progress import Progress

_PROGRESS = "progress.json"
KEEP = 2


def save_state(state: Path, engine: TrainEngine, progress: Progress, *, identity: dict[str, Any]) -> None:
    """Write the state after `progress.step` steps beside, then marker, then rename; drop all but the newest two.

    Called on every rank. identity: what must be equal for the state to be continued (settings, data, target).
    """
    final = state / f"step-{progress.step:08d}"
    draft = state / f".{final.name}.partial"
    if engine.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    engine.barrier()
    engine.save(draft)
    engine.barrier()
    if engine.rank == 0:
        (draft / _PROGRESS).write_text(json.dumps({**asdict(progress), "history": list(progress.history)}))
        publish(draft, final, {"identity": identity, "engine": engine.kind, "world_size": engine.world_size})
        for old in complete_states(state)[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    engine.barrier()


def complete_states(state: Path) -> list[Path]:
    """Folders with a marker, oldest first."""
    return sorted(folder for folder in state.glob("step-*") if is_complete(folder))


def load_state(state: Path, engine: TrainEngine, *, identity: dict[str, Any]) -> Progress | None:
    """Continue from the newest complete state, or None where there is none. Raises CheckpointError.

    States of other settings, data or target are refused; so is another number of ranks or another engine.
    """
    found = complete_states(state)
    if not found:
        return None
    folder = found[-1]
    manifest = verify(folder, kind="training state", error=CheckpointError)
    mine = {**identity, "engine": engine.kind, "world_size": engine.world_size}
    saved = {**manifest["identity"], "engine": manifest["engine"], "world_size": manifest["world_size"]}
    for key, value in mine.items():
        if saved.get(key) != value:
            raise CheckpointError(
                f"training state {folder} has {key} = {saved.get(key)!r}, this run {value!r}",
                mend="continue with the settings, data and ranks it was started with, or remove the folder",
            )
    engine.load(folder)
    values = json.loads((folder / _PROGRESS).read_text())
    return Progress(**{**values, "history": tuple(values["history"])})

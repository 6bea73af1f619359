"""run-once: curate -> train -> replay -> gate -> register (-> promote where policy allows), under a lease.

A job is a frozen window of offsets plus every setting that shapes its result; the key is the hash of those. Its stages
write their output into the job's folder, marker last; a stage whose output is there is skipped. Offsets are committed
last, so a kill anywhere repeats the job and the key makes the repeated stages no-ops. A job whose window is not in the
log any more is given up and planned anew, unless its snapshot is there: no later stage reads the log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from draftloop.pipeline import artifact
from draftloop.pipeline.data.curate import Window, pending_window
from draftloop.pipeline.errors import EmptySnapshotError, InputError
from draftloop.pipeline.fingerprint import require_same_digest
from draftloop.pipeline.lease import lease
from draftloop.pipeline.stages import JobContext, Stages
from draftloop.pipeline.stream.log import CaptureLog
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.workspace import Workspace

GROUP = "draftloop.curator.run-once"  # the curator's ACL covers groups under this prefix
STAGES = ("curate", "train", "replay", "gate", "register", "promote")


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a job will do, written before it does anything."""

    key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]  # becomes a folder's name
    topic: str
    topic_id: str  # the offsets of a topic made anew count other entries
    start: dict[int, int]
    stop: dict[int, int]
    fingerprint: str
    parent: str | None  # champion version this job continues and must beat
    parent_digest: str | None
    seed: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run-once came to."""

    outcome: str  # "nothing-to-do" | "stopped" | "refused" | "registered" | "promoted"
    reason: str
    job_key: str | None = None
    folder: Path | None = None
    details: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "job": self.job_key,
            "folder": str(self.folder) if self.folder else None,
            **(self.details or {}),
        }


def run_once(
    workspace: Workspace,
    stages: Stages,
    screen: Screen,
    *,
    last: str | None = None,
    after_stage: Callable[[str], None] | None = None,
) -> RunResult:
    """One cycle, or the rest of an interrupted one. Raises LeaseHeldError, and whatever a stage raises.

    With `last` the job stops after that stage and stays current: the next call goes on from there.

    `after_stage` is called with each finished stage's name (tests kill the process there).
    """
    with lease(workspace.lease, what="run"):
        for folder in (workspace.snapshots, workspace.drafters, workspace.root / "fetched", workspace.jobs):
            artifact.sweep(folder)
        log = workspace.open_log()
        try:
            plan = _unfinished(workspace, stages, log, screen) or _new_plan(workspace, stages, log)
            if isinstance(plan, str):
                screen.say(f"nothing to do: {plan}")
                return RunResult("nothing-to-do", plan)
            folder = workspace.jobs / plan.key
            artifact.sweep(folder)
            window = Window(plan.topic, plan.start, plan.stop)
            context = JobContext(plan.key, folder, window, plan.parent, plan.seed, log, screen)
            return _run(workspace, stages, plan, context, last, after_stage or (lambda name: None))
        except EmptySnapshotError:
            # Nothing in this window can be trained on: plan a wider one next time instead of failing on it for ever.
            _current(workspace).unlink(missing_ok=True)
            raise
        finally:
            log.close()


def _run(
    workspace: Workspace,
    stages: Stages,
    plan: JobPlan,
    context: JobContext,
    last: str | None,
    after_stage: Callable[[str], None],
) -> RunResult:
    outputs: dict[str, dict[str, Any]] = {}
    for name in STAGES:
        outputs[name] = _stage(stages, context, name, outputs)
        after_stage(name)
        if name == "gate" and not outputs["gate"]["passed"]:
            break
        if name == last:
            return RunResult("stopped", f"after {name}", context.key, context.folder, outputs)
    # The commit point: before it a kill repeats the job, after it the window is used up.
    lost = _lost(plan, context.log)
    if lost is None:
        context.log.commit(GROUP, plan.topic, plan.stop)
    else:  # these offsets would use up entries that no job has seen
        context.screen.say(f"job {plan.key}: no offsets to commit: {lost}")
    _current(workspace).unlink(missing_ok=True)
    after_stage("commit")
    outcome = "refused" if "promote" not in outputs else "promoted" if outputs["promote"]["promoted"] else "registered"
    return RunResult(outcome, "; ".join(outputs["gate"]["reasons"]), context.key, context.folder, outputs)


def _stage(stages: Stages, context: JobContext, name: str, outputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    done = context.folder / f"{name}.json"
    if done.is_file():
        output = _read_output(done, name)
        # Once registered, the registry has the drafter: what it was made from may be gone.
        if (context.folder / "register.json").is_file() or _is_at_hand(output):
            context.screen.say(f"{name}: already there")
            return output
        context.screen.say(f"{name}: {output['folder']} is gone: made again, and what follows from it")
        for later in reversed(STAGES[STAGES.index(name) :]):
            (context.folder / f"{later}.json").unlink(missing_ok=True)
    output = stages.run(name, context, outputs)
    artifact.write_json(done, output)
    return output


# What other stages and the loop read of a stage's output.
_READ: dict[str, frozenset[str]] = {
    "curate": frozenset({"snapshot", "folder", "counts"}),
    "train": frozenset({"digest", "folder"}),
    "gate": frozenset({"passed", "reasons"}),
    "register": frozenset({"version"}),
    "promote": frozenset({"promoted"}),
}


def _read_output(done: Path, name: str) -> dict[str, Any]:
    """A finished stage's output. Raises InputError where the file is not one."""
    try:
        output = json.loads(done.read_bytes())
    except ValueError:
        output = None
    if not isinstance(output, dict) or not _READ.get(name, frozenset()) <= output.keys():
        raise InputError(f"{done} is not the output of {name}", mend="remove the file and run the same command again")
    return output


def _lost(plan: JobPlan, log: CaptureLog) -> str | None:
    """Why the plan's window is not in the log any more; None where it is. Raises MissingTopicError."""
    if log.topic_id(plan.topic) != plan.topic_id:
        return f"topic {plan.topic!r} was made anew since it was planned"
    ends = log.end_offsets(plan.topic)
    for partition, stop in plan.stop.items():
        if stop > ends.get(partition, 0):
            there = f"ends at {ends[partition]}" if partition in ends else "is gone"
            return f"it goes to offset {stop} of partition {partition} of {plan.topic!r}, which {there}"
    return None


def _is_at_hand(output: dict[str, Any]) -> bool:
    return "folder" not in output or artifact.is_complete(Path(output["folder"]))


def _current(workspace: Workspace) -> Path:
    return workspace.jobs / "current.json"


def _unfinished(workspace: Workspace, stages: Stages, log: CaptureLog, screen: Screen) -> JobPlan | None:
    """The plan a killed run left behind, if it can go on; given up where its window is lost.

    Raises InputError, FingerprintMismatchError, MissingTopicError.
    """
    current = _current(workspace)
    if not current.is_file():
        return None
    try:
        plan = msgspec.json.decode(current.read_bytes(), type=JobPlan)
        require_same_digest(
            plan.fingerprint,
            stages.fingerprint_digest(),
            expected_of=f"unfinished job {plan.key}",
            found_of="the target given",
        )
    except msgspec.DecodeError as error:
        raise InputError(
            f"{current} is not a job plan: {error}", mend="remove the file; the window will be planned anew"
        ) from error
    lost = _lost(plan, log)
    if lost is None or _is_curated(workspace.jobs / plan.key):
        return plan
    screen.say(f"job {plan.key} is given up, nothing of it was committed, and a new one is planned: {lost}")
    current.unlink()
    return None


def _is_curated(folder: Path) -> bool:
    """Whether a job has its snapshot, or is past needing it."""
    done = folder / "curate.json"
    return (folder / "register.json").is_file() or (done.is_file() and _is_at_hand(_read_output(done, "curate")))


def _new_plan(workspace: Workspace, stages: Stages, log: CaptureLog) -> JobPlan | str:
    topic = workspace.raw_topic()
    pending = pending_window(log, topic, GROUP)
    num_new = pending.num_entries
    if num_new < workspace.config.loop.min_new_records:
        return f"{num_new} new records, loop.min_new_records is {workspace.config.loop.min_new_records}"
    champion = stages.champion()
    settings = {
        "topic": topic,
        "topic_id": log.topic_id(topic),
        "start": pending.start,
        "stop": pending.stop,
        "fingerprint": stages.fingerprint_digest(),
        "parent": champion.version if champion else None,
        "parent_digest": champion.digest if champion else None,
        "seed": workspace.config.seed,
    }
    sections = ("curate", "train", "replay", "gate", "registry")
    shaping = {name: getattr(workspace.config, name).model_dump(mode="json") for name in sections}
    body = msgspec.json.encode({**msgspec.to_builtins(settings, str_keys=True), **shaping}, order="sorted")
    key = hashlib.sha256(body).hexdigest()[:16]
    plan = msgspec.convert({"key": key, **settings}, JobPlan)
    artifact.write_json(_current(workspace), msgspec.to_builtins(plan, str_keys=True))
    return plan

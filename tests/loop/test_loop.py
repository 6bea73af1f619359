"""run-once over recording stages and the real SQLite log: order, skipping, resuming, leases, commits."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from draftloop.pipeline import artifact
from draftloop.pipeline.config import load
from draftloop.pipeline.data.curate import _check_window
from draftloop.pipeline.errors import EmptySnapshotError, FingerprintMismatchError, InputError, LeaseHeldError
from draftloop.pipeline.lease import lease
from draftloop.pipeline.loop import GROUP, STAGES, run_once
from draftloop.pipeline.registry.registry import Version
from draftloop.pipeline.stages import JobContext
from draftloop.pipeline.stream.log import LogEntry, MemoryLog
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.workspace import Workspace

QUIET = Screen(quiet=True)


class Listening(Screen):
    """A screen whose lines are kept."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


class RecordingStages:
    """The stages' twin: writes down what ran, answers what it is told. Like the real one, curate needs its window."""

    def __init__(self, ledger: Path, *, passed: bool = True, promote: bool = True, fingerprint: str = "f" * 16) -> None:
        self.ledger = ledger
        self.passed = passed
        self.promote = promote
        self.fingerprint = fingerprint

    def run(self, name: str, context: JobContext, outputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
        with self.ledger.open("a") as ledger:
            ledger.write(f"{name}\n")
        if name == "curate":
            _check_window(context.log, context.window)
        made = self.ledger.with_name(f"made-by-{name}")
        if name in ("curate", "train"):
            made.mkdir(exist_ok=True)
            (made / artifact.MARKER).touch()
        answers: dict[str, dict[str, Any]] = {
            "curate": {"snapshot": "s", "folder": str(made), "counts": {}},
            "train": {"digest": "d", "folder": str(made)},
            "gate": {"passed": self.passed, "reasons": ["ratio 1.2"]},
            "register": {"version": "1"},
            "promote": {"promoted": self.promote},
        }
        return answers.get(name, {"ran": name})

    def champion(self) -> Version | None:
        return None

    def fingerprint_digest(self) -> str:
        return self.fingerprint

    def ran(self) -> list[str]:
        return self.ledger.read_text().split() if self.ledger.exists() else []


class Interrupted(RecordingStages):
    """Killed before anything was done."""

    def run(self, name: str, context: JobContext, outputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
        raise KeyboardInterrupt


def workspace_with(tmp_path: Path, *, num_records: int) -> Workspace:
    workspace = Workspace(load([], [f"work='{tmp_path / 'work'}'", "loop.min_new_records=10"]))
    add_records(workspace, num_records)
    return workspace


def add_records(workspace: Workspace, num_records: int) -> None:
    log = workspace.open_log()
    log.append(workspace.raw_topic(), [LogEntry(str(index).encode(), b"x") for index in range(num_records)])
    log.close()


def make_log_anew(workspace: Workspace, num_records: int) -> None:
    """Another log with a topic of the same name, as after a deletion."""
    for file in workspace.root.glob("capture.db*"):
        file.unlink()
    add_records(workspace, num_records)


def cut_log(workspace: Workspace) -> None:
    """The same topic with fewer entries, as from an older copy."""
    with closing(sqlite3.connect(workspace.root / "capture.db")) as connection:
        connection.execute("UPDATE partitions SET next_offset = next_offset / 2")
        connection.commit()


def committed(workspace: Workspace) -> int:
    log = workspace.open_log()
    total = sum(log.committed(GROUP, workspace.raw_topic()).values())
    log.close()
    return total


def test_too_few_new_records_is_nothing_to_do_and_says_why(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=9)
    result = run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET)
    assert (result.outcome, result.reason) == ("nothing-to-do", "9 new records, loop.min_new_records is 10")


def test_a_passed_job_runs_every_stage_once_in_order_and_commits_its_window(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    stages = RecordingStages(tmp_path / "ran")
    assert run_once(workspace, stages, QUIET).outcome == "promoted"
    assert stages.ran() == list(STAGES)
    assert committed(workspace) == 12
    assert run_once(workspace, stages, QUIET).outcome == "nothing-to-do"


def test_a_refused_job_registers_nothing_and_uses_up_its_window(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    stages = RecordingStages(tmp_path / "ran", passed=False)
    assert run_once(workspace, stages, QUIET).outcome == "refused"
    assert stages.ran() == ["curate", "train", "replay", "gate"]
    assert committed(workspace) == 12


def test_without_auto_promotion_the_job_ends_registered(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    assert run_once(workspace, RecordingStages(tmp_path / "ran", promote=False), QUIET).outcome == "registered"


def test_a_job_stopped_after_a_stage_goes_on_from_there_with_the_same_window(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    stages = RecordingStages(tmp_path / "ran")
    first = run_once(workspace, stages, QUIET, last="train")
    assert (first.outcome, stages.ran(), committed(workspace)) == ("stopped", ["curate", "train"], 0)
    add_records(workspace, 5)
    second = run_once(workspace, stages, QUIET)
    assert second.job_key == first.job_key
    assert stages.ran() == list(STAGES)
    assert committed(workspace) == 12, "records that came after the window belong to the next job"


def _run_and_die_after(tmp_path: Path, stage: str) -> None:
    def die(name: str) -> None:
        if name == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    workspace = Workspace(load([], [f"work='{tmp_path / 'work'}'", "loop.min_new_records=10"]))
    run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET, after_stage=die)


@pytest.mark.parametrize("stage", [*STAGES, "commit"])
def test_a_run_killed_after_any_stage_resumes_without_repeating_it(tmp_path: Path, stage: str) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    child = multiprocessing.get_context("fork").Process(target=_run_and_die_after, args=(tmp_path, stage))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    stages = RecordingStages(tmp_path / "ran")
    again = run_once(workspace, stages, QUIET)
    assert again.outcome == ("nothing-to-do" if stage == "commit" else "promoted")
    assert stages.ran() == list(STAGES)
    assert committed(workspace) == 12


def test_a_second_run_at_once_is_refused_with_the_lease_exit_code(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    with lease(workspace.lease, what="run"), pytest.raises(LeaseHeldError, match=f"process {os.getpid()}") as caught:
        run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET)
    assert caught.value.exit_code == 75


def test_the_lease_of_a_dead_holder_is_free(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    workspace.lease.write_text(json.dumps({"pid": 999999999, "since": 0}))
    assert run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET).outcome == "promoted"


def test_an_unfinished_job_of_another_target_is_named_and_not_continued(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET, last="curate")
    with pytest.raises(FingerprintMismatchError, match="unfinished job"):
        run_once(workspace, RecordingStages(tmp_path / "ran", fingerprint="e" * 16), QUIET)


def test_a_damaged_plan_is_named_with_its_mend(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    workspace.jobs.mkdir(parents=True)
    (workspace.jobs / "current.json").write_text("{")
    with pytest.raises(InputError, match=r"current\.json is not a job plan"):
        run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET)


def test_a_window_with_nothing_usable_is_planned_anew_and_wider(tmp_path: Path) -> None:
    class EmptyOnce(RecordingStages):
        def run(self, name: str, context: JobContext, outputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
            if sum(context.window.stop.values()) == 12:
                raise EmptySnapshotError("nothing kept")
            return super().run(name, context, outputs)

    workspace = workspace_with(tmp_path, num_records=12)
    stages = EmptyOnce(tmp_path / "ran")
    with pytest.raises(EmptySnapshotError):
        run_once(workspace, stages, QUIET)
    add_records(workspace, 1)
    assert run_once(workspace, stages, QUIET).outcome == "promoted"
    assert committed(workspace) == 13


@pytest.mark.parametrize("content", [b"", b'{"folder": "/x', b"\xff\x00", b"[]", b"null", b"{}"])
@pytest.mark.parametrize("stage", ["curate", "train", "gate"])
def test_a_damaged_stage_file_is_named_and_removing_it_mends(tmp_path: Path, stage: str, content: bytes) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    stages = RecordingStages(tmp_path / "ran")
    stopped = run_once(workspace, stages, QUIET, last="gate")
    assert stopped.folder is not None
    file = stopped.folder / f"{stage}.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=rf"{stage}\.json is not the output of {stage}") as caught:
        run_once(workspace, stages, QUIET)
    assert caught.value.mend == "remove the file and run the same command again"
    file.unlink()
    assert run_once(workspace, stages, QUIET).outcome == "promoted"


@pytest.mark.parametrize("stage", ["curate", "train"])
def test_a_folder_that_was_removed_is_made_again_with_all_that_follows(tmp_path: Path, stage: str) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    stages = RecordingStages(tmp_path / "ran")
    run_once(workspace, stages, QUIET, last="gate")
    shutil.rmtree(tmp_path / f"made-by-{stage}")
    assert run_once(workspace, stages, QUIET).outcome == "promoted"
    assert stages.ran() == [*STAGES[:4], *STAGES[STAGES.index(stage) :]]


def test_a_folder_that_was_removed_after_registering_is_not_needed(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    stages = RecordingStages(tmp_path / "ran")
    run_once(workspace, stages, QUIET, last="register")
    shutil.rmtree(tmp_path / "made-by-train")
    assert run_once(workspace, stages, QUIET).outcome == "promoted"
    assert stages.ran() == list(STAGES)


@pytest.mark.parametrize("key", ["../../../evil", "", "a/b", "A" * 16])
def test_a_plan_whose_key_is_no_folder_of_ours_is_refused(tmp_path: Path, key: str) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET, last="curate")
    current = workspace.jobs / "current.json"
    current.write_text(json.dumps({**json.loads(current.read_bytes()), "key": key}))
    with pytest.raises(InputError, match=r"current\.json is not a job plan"):
        run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET)


def test_a_run_removes_what_a_killed_run_left_half_written(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    left = [workspace.snapshots / ".s.abcd_123", workspace.drafters / ".d.xyz00000", workspace.jobs / ".j.12345678"]
    for folder in left:
        folder.mkdir(parents=True)
    assert run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET).outcome == "promoted"
    assert not any(folder.exists() for folder in left)


@pytest.mark.parametrize("num_new", [0, 5, 12, 40])
def test_a_job_whose_topic_was_made_anew_is_given_up_and_planned_anew(tmp_path: Path, num_new: int) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    with pytest.raises(KeyboardInterrupt):
        run_once(workspace, Interrupted(tmp_path / "ran"), QUIET)
    plan = json.loads((workspace.jobs / "current.json").read_bytes())
    make_log_anew(workspace, num_new)
    screen = Listening()
    stages = RecordingStages(tmp_path / "again")
    result = run_once(workspace, stages, screen)
    assert screen.said[0] == (
        f"job {plan['key']} is given up, nothing of it was committed, and a new one is planned: "
        f"topic {workspace.raw_topic()!r} was made anew since it was planned"
    )
    assert result.outcome == ("promoted" if num_new >= 10 else "nothing-to-do")
    assert result.job_key != plan["key"]  # the same offsets of another topic are another job
    assert committed(workspace) == (num_new if num_new >= 10 else 0)
    add_records(workspace, 10)
    assert run_once(workspace, stages, QUIET).outcome == "promoted"


def test_a_job_whose_log_lost_its_end_is_given_up_and_planned_anew(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=40)
    with pytest.raises(KeyboardInterrupt):
        run_once(workspace, Interrupted(tmp_path / "ran"), QUIET)
    cut_log(workspace)
    screen = Listening()
    assert run_once(workspace, RecordingStages(tmp_path / "again"), screen).outcome == "promoted"
    assert re.search(
        r"is given up, .* it goes to offset \d+ of partition 0 of '.*', which ends at \d+$", screen.said[0]
    )
    assert 10 <= committed(workspace) <= 20


@pytest.mark.parametrize("last", ["curate", "train", "gate", "register"])
def test_a_job_with_its_snapshot_goes_on_without_the_log_and_commits_nothing(tmp_path: Path, last: str) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    stages = RecordingStages(tmp_path / "ran")
    stopped = run_once(workspace, stages, QUIET, last=last)
    make_log_anew(workspace, 30)
    screen = Listening()
    result = run_once(workspace, stages, screen)
    assert (result.outcome, result.job_key) == ("promoted", stopped.job_key)
    assert stages.ran() == list(STAGES)
    assert screen.said[-1].startswith(f"job {stopped.job_key}: no offsets to commit: topic ")
    assert committed(workspace) == 0
    following = run_once(workspace, RecordingStages(tmp_path / "next"), QUIET)
    assert (following.outcome, committed(workspace)) == ("promoted", 30)


def test_a_job_whose_snapshot_is_gone_too_is_given_up(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, num_records=12)
    stopped = run_once(workspace, RecordingStages(tmp_path / "ran"), QUIET, last="train")
    make_log_anew(workspace, 12)
    shutil.rmtree(tmp_path / "made-by-curate")
    result = run_once(workspace, RecordingStages(tmp_path / "again"), QUIET)
    assert (result.outcome, committed(workspace)) == ("promoted", 12)
    assert result.job_key != stopped.job_key


def test_a_topic_made_anew_while_a_job_runs_keeps_its_entries_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(load([], [f"work='{tmp_path / 'work'}'", "loop.min_new_records=10"]))
    topic = workspace.raw_topic()
    log = MemoryLog()

    def make_anew(num_records: int) -> None:
        log.__init__()  # type: ignore[misc]
        log.create_topic(topic, num_partitions=1)
        log.append(topic, [LogEntry(b"k", b"x")] * num_records)

    class Meanwhile(RecordingStages):
        def run(self, name: str, context: JobContext, outputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
            if name == "train":
                make_anew(40)
            return super().run(name, context, outputs)

    make_anew(12)
    monkeypatch.setattr(Workspace, "open_log", lambda workspace: log)
    assert run_once(workspace, Meanwhile(tmp_path / "ran"), QUIET).outcome == "promoted"
    assert log.committed(GROUP, topic) == {0: 0}
    assert run_once(workspace, RecordingStages(tmp_path / "next"), QUIET).outcome == "promoted"
    assert log.committed(GROUP, topic) == {0: 40}

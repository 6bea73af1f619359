"""Published folders: whole or not there, and never trusted without a check."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import SnapshotError, StorageError


def publish(final: Path, text: str = "rows") -> dict[str, object]:
    with artifact.staging(final) as draft:
        (draft / "part").mkdir()
        (draft / "part" / "data.bin").write_text(text)
        (draft / "notes.txt").write_text("notes")
        return artifact.publish(draft, final, {"kind": "thing"})


def verify(folder: Path) -> dict[str, object]:
    return artifact.verify(folder, kind="thing", error=SnapshotError)


def test_what_was_published_verifies_and_lists_every_file(tmp_path: Path) -> None:
    sealed = publish(tmp_path / "deep" / "final")
    manifest = verify(tmp_path / "deep" / "final")
    assert manifest == sealed
    assert manifest["kind"] == "thing"
    assert manifest["files"] == {
        name: artifact.sha256_file(tmp_path / "deep" / "final" / name) for name in ("notes.txt", "part/data.bin")
    }


def test_nothing_but_the_folder_is_left_behind(tmp_path: Path) -> None:
    publish(tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def _write_half_then(final: Path, error: Exception) -> NoReturn:
    with artifact.staging(final) as draft:
        (draft / "half").write_text("half")
        raise error


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _write_half_then(tmp_path / "final", ZeroDivisionError())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_storage_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"final failed: .*No space left") as caught:
        _write_half_then(tmp_path / "final", OSError(errno.ENOSPC, "No space left on device"))
    assert caught.value.mend == "free disk space; nothing was published"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_hold_a_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write beside"), artifact.staging(tmp_path / "file" / "final"):
        pass


def test_an_artifact_already_there_stays_as_it_is(tmp_path: Path) -> None:
    publish(tmp_path / "final", "first")
    publish(tmp_path / "final", "second")
    assert (tmp_path / "final" / "part" / "data.bin").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_folder_without_its_marker_is_replaced(tmp_path: Path) -> None:
    publish(tmp_path / "final", "first")
    (tmp_path / "final" / "COMPLETE").unlink()
    assert not artifact.is_complete(tmp_path / "final")
    publish(tmp_path / "final", "second")
    verify(tmp_path / "final")
    assert (tmp_path / "final" / "part" / "data.bin").read_text() == "second"


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda folder: folder.rename(folder.with_name("moved")), "no thing at"),
    "no marker": (lambda folder: (folder / "COMPLETE").unlink(), "its writing was cut off"),
    "other marker": (lambda folder: (folder / "COMPLETE").write_text("0" * 64), "not the one its marker names"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "not the one its marker names"),
    "other manifest": (lambda folder: (folder / "manifest.json").write_text("{}"), "not the one its marker names"),
    "altered": (lambda folder: (folder / "part" / "data.bin").write_text("rowz"), "part/data.bin was altered"),
    "cut": (lambda folder: os.truncate(folder / "part" / "data.bin", 2), "part/data.bin was altered"),
    "missing": (lambda folder: (folder / "notes.txt").unlink(), "notes.txt is missing"),
    "extra": (lambda folder: (folder / "more.txt").touch(), "more.txt is unknown"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_by_file_in_the_caller_s_own_error(tmp_path: Path, damage: str) -> None:
    harm, message = DAMAGE[damage]
    publish(tmp_path / "final")
    harm(tmp_path / "final")
    with pytest.raises(SnapshotError, match=message) as caught:
        verify(tmp_path / "final")
    assert caught.value.mend


def test_an_artifact_may_be_moved(tmp_path: Path) -> None:
    publish(tmp_path / "final")
    (tmp_path / "final").rename(tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere")["kind"] == "thing"


KILLED = """
import os, signal, sys
from pathlib import Path
from draftloop.pipeline import artifact
final = Path(sys.argv[1])
calls = 0
real = os.fsync
def deadly(descriptor):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)
os.fsync = deadly
with artifact.staging(final) as draft:
    (draft / "data.bin").write_text("rows")
    artifact.publish(draft, final, {"kind": "thing"})
print(calls)
"""


def killed_at(final: Path, sync: int) -> int:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", KILLED, str(final), str(sync)]
    return subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode


def test_a_kill_at_any_sync_leaves_the_whole_folder_or_none(tmp_path: Path) -> None:
    outcomes = []
    for sync in range(1, 20):
        final = tmp_path / str(sync) / "final"
        code = killed_at(final, sync)
        if final.exists():
            assert verify(final)["kind"] == "thing"
        if code == 0:
            break
        assert code == -signal.SIGKILL
        outcomes.append(final.exists())
        publish(final)  # what the killed one left behind does not stand in the way
        assert verify(final)["kind"] == "thing"
    assert len(outcomes) >= 4
    assert outcomes == sorted(outcomes)
    assert outcomes[-1] is True
    assert outcomes[0] is False


def test_json_is_replaced_in_one_step_and_leaves_no_helper_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    artifact.write_json(path, {"b": 1, "a": None})
    artifact.write_json(path, {"b": 2})
    assert json.loads(path.read_text()) == {"b": 2}
    assert [found.name for found in path.parent.iterdir()] == ["state.json"]


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "state.json"
    folder.mkdir()
    (folder / "inside").touch()
    with pytest.raises(StorageError, match=r"writing .*state.json failed") as caught:
        artifact.write_json(folder, {"b": 2})
    assert caught.value.mend
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("marker", [b"\xff\xfe\x00\x80", b""])
def test_a_marker_that_is_no_digest_is_an_error_of_the_folder(tmp_path: Path, marker: bytes) -> None:
    publish(tmp_path / "final")
    (tmp_path / "final" / artifact.MARKER).write_bytes(marker)
    with pytest.raises(SnapshotError, match=r"manifest\.json is not the one its marker names"):
        verify(tmp_path / "final")


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"files": []}', b"\xff"])
def test_a_sealed_manifest_of_another_form_is_an_error_of_the_folder(tmp_path: Path, body: bytes) -> None:
    publish(tmp_path / "final")
    (tmp_path / "final" / artifact.MANIFEST).write_bytes(body)
    (tmp_path / "final" / artifact.MARKER).write_text(hashlib.sha256(body).hexdigest())
    with pytest.raises(SnapshotError, match=r"manifest\.json is not a manifest"):
        verify(tmp_path / "final")


STAGE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from draftloop.pipeline import artifact
with artifact.staging(Path(sys.argv[1])) as draft:
    (draft / "half").write_text("half")
    artifact.os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    artifact.write_json(Path(sys.argv[1]).with_name("stage.json"), {})
"""


def test_what_a_killed_writer_left_is_swept_and_what_a_living_one_stages_stays(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STAGE_AND_DIE, str(tmp_path / "dead")], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "a hidden folder and a hidden file"
    (tmp_path / ".keep").touch()
    publish(tmp_path / "final")
    with artifact.staging(tmp_path / "alive") as draft:
        artifact.sweep(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {".keep", "final", draft.name}
    artifact.sweep(tmp_path / "not-there")

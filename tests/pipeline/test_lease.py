"""The lease: one holder, freed by the kernel."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftloop.pipeline.errors import LeaseHeldError, StorageError
from draftloop.pipeline.lease import lease

HOLD = """
import sys, time
from pathlib import Path
from draftloop.pipeline.lease import lease
with lease(Path(sys.argv[1]), what="run"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lease_held_by_another_process_is_refused_and_free_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "lease.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LeaseHeldError, match=f"process {holder.pid}"), lease(path, what="run"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with lease(path, what="run"):
        pass


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"lease\.lock"), lease(tmp_path / "file" / "lease.lock", what="run"):
        pass
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("content", [b"[]", b"{}", b"5", b"\xff\x00", b'{"pid": 1, "since": "noon"}'])
def test_a_held_lease_with_an_unreadable_file_is_still_a_held_lease(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lease.lock"
    with lease(path, what="run"):
        path.write_bytes(content)
        with pytest.raises(LeaseHeldError, match="holder unknown"), lease(path, what="run"):
            pass


def test_a_full_disk_is_told_with_the_lease_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"lease\.lock: .*No space left"), lease(tmp_path / "lease.lock", what="run"):
        pass

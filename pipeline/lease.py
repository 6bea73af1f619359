"""One run at a time per work folder: a lock the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftloop.pipeline.errors import LeaseHeldError, StorageError


@contextmanager
def lease(path: Path, *, what: str) -> Iterator[None]:
    """Hold the lease for the block. Raises LeaseHeldError naming the holder, StorageError without a lock file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(
            f"cannot make the lease file {path}: {error}", mend="check the work folder's rights"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LeaseHeldError(
                f"another {what} holds {path} ({_holder(descriptor)})", mend="wait for it to end, then start again"
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "since": int(time.time())}).encode(), 0)
        except OSError as error:
            raise StorageError(f"cannot write the lease file {path}: {error}", mend="free disk space") from error
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        known = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {known['pid']}, since {time.strftime('%H:%M:%S', time.localtime(known['since']))}"
    except (ValueError, TypeError, KeyError, OverflowError):  # being written, or not ours
        return "holder unknown"

"""Files and folders that are ours alone: written whole or not at all, not used where others could change them."""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def write_private(file: Path, data: bytes) -> None:
    """Write a file only its owner can read, whole or not at all, whoever else writes it too. Raises OSError."""
    draft = file.with_name(f".{file.name}.draft")  # one name: what a kill leaves, the next write takes up
    descriptor = _own(draft)
    try:
        try:
            os.ftruncate(descriptor, 0)
            with os.fdopen(os.dup(descriptor), "wb") as stream:
                stream.write(data)
            os.fsync(descriptor)
            draft.replace(file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    finally:
        os.close(descriptor)
    _settle(file.parent)


def make_private(folder: Path) -> None:
    """Make a folder that only its owner gets into, whatever the umask; one that is there stays. Raises OSError."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)


def not_ours(path: Path, *, may_be_written: bool = False) -> tuple[str, str] | None:
    """What is wrong with a path that should be ours alone, and its mend; None where all is well. Raises OSError.

    may_be_written: others' right to write does not matter here, who owns it does.
    """
    link, found = path.lstat(), path.stat()
    for owner in {link.st_uid, found.st_uid} - {os.geteuid()}:
        return f"{path} belongs to {_user(owner)}, not to {_user(os.geteuid())}", f"chown {_user(os.geteuid())} {path}"
    if found.st_mode & OTHERS_WRITE and not may_be_written:
        return f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o})", f"chmod go-w {path}"
    return None


def _own(draft: Path) -> int:
    """A descriptor of the draft, empty or left over, that nobody else holds until it is closed."""
    while True:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = os.fstat(descriptor)
            if _is_at(held, draft):  # else whoever held it before has made it the file itself
                if held.st_uid == os.geteuid() and stat.S_IMODE(held.st_mode) == 0o600 and held.st_nlink == 1:
                    return descriptor
                draft.unlink(missing_ok=True)  # a left-over with other rights: somebody may have it open
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(held: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(held, path.lstat())
    except FileNotFoundError:
        return False


def _settle(folder: Path) -> None:
    """Make the new name outlast a loss of power, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"

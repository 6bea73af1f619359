"""Folders that are whole or not there: write everything beside, then the marker, then one rename.

An artifact folder holds files, `manifest.json` (with the sha256 of every other file) and, last, the marker `COMPLETE`
with the sha256 of the manifest. Readers trust nothing without the marker.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from draftloop.pipeline.errors import DraftloopError, StorageError

MANIFEST = "manifest.json"
MARKER = "COMPLETE"
_BESIDE = re.compile(r"\..+\.([a-z0-9_]{8}|[0-9]+)")  # what `staging` and `write_json` write beside


def sha256_file(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def staging(final: Path) -> Iterator[Path]:
    """A fresh folder beside `final` to write into; removed if the block fails. Raises StorageError for a full disk."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    except OSError as error:
        raise StorageError(
            f"cannot write beside {final}: {error}", mend="free disk space or fix the folder's rights"
        ) from error
    try:
        with _claimed(draft):
            yield draft
    except OSError as error:
        raise StorageError(f"writing {final} failed: {error}", mend="free disk space; nothing was published") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sweep(folder: Path, *, of: str | None = None) -> None:
    """Remove what killed writers left beside their goals in `folder` (beside the goal named `of` only, where given).

    A folder being staged is locked by its writer and stays. JSON files are not: hold the lease of whoever writes them.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _BESIDE.fullmatch(path.name) or path.is_symlink():
            continue
        if of is not None and path.name.rpartition(".")[0] != f".{of}":
            continue
        with suppress(OSError), _claimed(path):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


@contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Hold a lock on a file or folder that the kernel frees with this process. Raises OSError if another holds it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def publish(draft: Path, final: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Seal a staging folder with manifest and marker and rename it to `final`. An equal artifact already there stays.

    Returns the manifest as written, `files` included. Raises StorageError.
    """
    files = {str(path.relative_to(draft)): sha256_file(path) for path in sorted(draft.rglob("*")) if path.is_file()}
    sealed = {**manifest, "files": files}
    body = json.dumps(sealed, indent=1, sort_keys=True).encode()
    _write_synced(draft / MANIFEST, body)
    for path in draft.rglob("*"):
        if path.is_file():
            _sync(path)
    _write_synced(draft / MARKER, hashlib.sha256(body).hexdigest().encode())
    _sync(draft)
    if final.exists():
        if (final / MARKER).is_file():
            return sealed
        shutil.rmtree(final)
    os.rename(draft, final)
    _sync(final.parent)
    return sealed


def is_complete(folder: Path) -> bool:
    """Whether the marker is there. Says nothing about damage since: that is `verify`."""
    return (folder / MARKER).is_file()


def verify(folder: Path, *, kind: str, error: type[DraftloopError]) -> dict[str, Any]:
    """Check marker, manifest and every file's digest; return the manifest. Raises `error` naming what differs."""
    mend = f"make the {kind} again (remove the folder, run the same command) or restore it; nothing was changed"
    if not folder.is_dir():
        raise error(f"no {kind} at {folder}", mend="check the path")
    if not is_complete(folder):
        raise error(f"{kind} {folder} has no {MARKER} marker: its writing was cut off", mend=mend)
    try:
        return _checked(folder, kind, error, mend)
    except OSError as failure:
        raise error(
            f"{kind} {folder} cannot be read: {failure}", mend="check the disk and the folder's rights"
        ) from failure


def _checked(folder: Path, kind: str, error: type[DraftloopError], mend: str) -> dict[str, Any]:
    body = (folder / MANIFEST).read_bytes() if (folder / MANIFEST).is_file() else b""
    if hashlib.sha256(body).hexdigest().encode() != (folder / MARKER).read_bytes().strip():
        raise error(f"{kind} {folder}: {MANIFEST} is not the one its marker names", mend=mend)
    try:
        manifest: Any = json.loads(body)
    except ValueError:
        manifest = None
    expected = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(expected, dict):
        raise error(f"{kind} {folder}: {MANIFEST} is not a manifest", mend=mend)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {MANIFEST, MARKER}
    if found != expected.keys():
        odd = sorted(found ^ expected.keys())[0]
        raise error(f"{kind} {folder}: file {odd} is {'unknown to' if odd in found else 'missing from'} it", mend=mend)
    for name, digest in expected.items():
        if sha256_file(folder / name) != digest:
            raise error(f"{kind} {folder}: file {name} was altered (sha256 differs from the manifest)", mend=mend)
    return dict(manifest)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file in one step, so that a reader or a kill never sees half of it. Raises StorageError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_synced(beside, json.dumps(value, indent=1, sort_keys=True).encode())
        os.replace(beside, path)
        _sync(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StorageError(f"writing {path} failed: {error}", mend="free disk space; the old file stands") from error


def _write_synced(path: Path, body: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

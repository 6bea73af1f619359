"""Folders that are whole or not there: write everything beside, then the marker, then one rename.

An artifact folder holds files, `manifest.json` (with the sha256 of every other file) and, last, the marker `COMPLETE`
with the sha256 of the manifest. Readers trust nothing without the marker.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftloop.pipeline.errors import DraftloopError, StorageError

MANIFEST = "manifest.json"
MARKER = "COMPLETE"


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
        yield draft
    except OSError as error:
        raise StorageError(f"writing {final} failed: {error}", mend="free disk space; nothing was published") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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
    mend = f"make the {kind} again or restore it from a copy; nothing was changed"
    if not folder.is_dir():
        raise error(f"no {kind} at {folder}", mend="check the path")
    if not is_complete(folder):
        raise error(f"{kind} {folder} has no {MARKER} marker: its writing was cut off", mend=mend)
    body = (folder / MANIFEST).read_bytes() if (folder / MANIFEST).is_file() else b""
    if hashlib.sha256(body).hexdigest() != (folder / MARKER).read_text().strip():
        raise error(f"{kind} {folder}: {MANIFEST} is not the one its marker names", mend=mend)
    manifest: dict[str, Any] = json.loads(body)
    expected: dict[str, str] = manifest["files"]
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {MANIFEST, MARKER}
    if found != expected.keys():
        odd = sorted(found ^ expected.keys())[0]
        raise error(f"{kind} {folder}: file {odd} is {'unknown to' if odd in found else 'missing from'} it", mend=mend)
    for name, digest in expected.items():
        if sha256_file(folder / name) != digest:
            raise error(f"{kind} {folder}: file {name} was altered (sha256 differs from the manifest)", mend=mend)
    return manifest


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

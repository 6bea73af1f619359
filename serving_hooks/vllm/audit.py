"""Who asked for what, and what came of it: JSON lines, on disk before the answer goes out."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from draftloop.pipeline.errors import StorageError


class Audit:
    """Appends; readable by its owner only."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def require(self) -> None:
        """Raise StorageError if nothing can be written: what cannot be written down is not done."""
        self._append(b"")

    def write(self, act: str, outcome: str, **facts: Any) -> None:
        """One line. Raises StorageError."""
        line = json.dumps({"time": round(time.time(), 3), "act": act, "outcome": outcome, **facts}) + "\n"
        self._append(line.encode())

    def _append(self, data: bytes) -> None:
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(f"audit file {self._file}: {error}", mend="free disk space or mend its rights") from None

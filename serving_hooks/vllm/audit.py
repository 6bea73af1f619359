"""Who asked for what, and what came of it: JSON lines, on disk before the answer goes out."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftloop.pipeline.errors import StorageError

DENIALS_S = 1.0  # between two lines of denials


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


class Denials:
    """Turned away without a token, so by anybody: a line a second at most, and every call is in the count of one."""

    def __init__(self, write: Callable[[str], bool]) -> None:
        """write: one line with this reason, from any thread; False where it did not reach the disk."""
        self._write = write
        self._count = 0
        self._reason = ""
        self._later: asyncio.Task[None] | None = None

    async def add(self, reason: str) -> None:
        """One more. The first in a while is on disk when this returns, others soon."""
        self._count += 1
        self._reason = reason
        if self._later is None:
            self._later = asyncio.create_task(self._write_later())
            await self._write_down()

    async def _write_later(self) -> None:
        try:
            await asyncio.sleep(DENIALS_S)
            while self._count and await self._write_down():
                await asyncio.sleep(DENIALS_S)
        except asyncio.CancelledError:  # the server ends
            if self._count:
                self._write(self._line(self._count))
            raise
        finally:
            self._later = None

    async def _write_down(self) -> bool:
        count, self._count = self._count, 0
        written = await asyncio.to_thread(self._write, self._line(count))
        if not written:
            self._count += count
        return written

    def _line(self, count: int) -> str:
        return self._reason if count == 1 else f"{self._reason}; {count} such calls since the last line"

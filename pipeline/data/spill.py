"""Rows on disk between the two passes of a curation, in files by the leading bits of their rank.

They arrive in the log's order and leave in the order of their ranks, which is random: with many small files a reader
jumps about in one of them at a time, and that one fits into any page cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

ROWS_PER_FILE = 8192  # 32 MB of rows of 4 KB
MAX_BITS = 7  # 128 files a side: well under the usual limit of 1024 open files
BUFFER_BYTES = 64 << 10


class Spill:
    """Packed rows by side and rank: written in any order, then read once in rank order. Raises OSError."""

    def __init__(self, folder: Path, *, num_rows: int) -> None:
        """`num_rows`: about how many will come."""
        folder.mkdir()
        self._folder = folder
        self._shift = 8 - min(MAX_BITS, (num_rows // ROWS_PER_FILE).bit_length())
        self._writers: dict[tuple[str, int], BinaryIO] = {}
        self._sizes: dict[tuple[str, int], int] = {}

    def add(self, side: str, rank: bytes, packed: bytes) -> tuple[int, int]:
        """Keep a row; returns its place in its file and its size, bytes."""
        key = side, rank[0] >> self._shift
        place = self._sizes.get(key)
        if place is None:
            place = 0
            self._writers[key] = self._path(key).open("wb", buffering=BUFFER_BYTES)
        size = self._writers[key].write(packed)
        self._sizes[key] = place + size
        return place, size

    def take(self, side: str, rows: Iterable[tuple[bytes, int, int]]) -> Iterator[bytes]:
        """The rows of the (rank, place, size) given, ordered by rank. A file goes when it has been read."""
        self.close()
        open_key, descriptor = None, -1
        try:
            for rank, place, size in rows:
                if open_key != (key := (side, rank[0] >> self._shift)):
                    self._drop(open_key, descriptor)
                    open_key, descriptor = key, os.open(self._path(key), os.O_RDONLY)
                    _read_ahead(descriptor)
                yield os.pread(descriptor, size, place)
        finally:
            self._drop(open_key, descriptor)

    def close(self) -> None:
        """Finish writing."""
        while self._writers:
            self._writers.popitem()[1].close()

    def _path(self, key: tuple[str, int]) -> Path:
        return self._folder / f"{key[0]}-{key[1]}"

    def _drop(self, key: tuple[str, int] | None, descriptor: int) -> None:
        if key is not None:
            os.close(descriptor)
            self._path(key).unlink()


def _read_ahead(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):  # not on macOS; there it is slower from a cold cache only
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)

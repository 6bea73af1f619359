"""The capture log as one SQLite file: one machine, many processes, no service.

Concurrency: WAL, so readers never wait for a writer; writers queue on BEGIN IMMEDIATE, so two of them never both read
the next offset. Durability: synchronous=FULL, because `append` promises it and NORMAL in WAL mode loses the last
commits on power loss; the cost is one fsync per batch, paid by the thread that sends captures, not by a request.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from draftloop.pipeline.errors import StorageError
from draftloop.pipeline.stream.log import (
    LogEntry,
    Offsets,
    StoredEntry,
    partition_of,
    require_partitions,
    unknown_topic,
)

SCHEMA_VERSION = 1
READ_PAGE = 256  # entries fetched per lock hold: a slow reader neither blocks writers nor keeps the WAL from shrinking

_TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
    "CREATE TABLE topics (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    # The next offset is kept apart from the entries: erased entries must not hand their offsets to new ones.
    "CREATE TABLE partitions (topic INTEGER NOT NULL, number INTEGER NOT NULL, next_offset INTEGER NOT NULL,"
    " PRIMARY KEY (topic, number)) WITHOUT ROWID",
    "CREATE TABLE entries (topic INTEGER NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL,"
    " time_ms INTEGER NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (topic, number, offset))",
    "CREATE TABLE commits (topic INTEGER NOT NULL, number INTEGER NOT NULL, consumer TEXT NOT NULL,"
    " next_offset INTEGER NOT NULL, PRIMARY KEY (topic, number, consumer)) WITHOUT ROWID",
)


class SqliteLog:
    """CaptureLog over a SQLite file, mode 0600. Safe for threads; a forked child must open its own."""

    def __init__(self, path: Path, *, busy_timeout_s: float = 30.0, max_bytes: int | None = None) -> None:
        """Open or create the log. `max_bytes` bounds the file: a full log refuses appends as a full disk does.

        Raises StorageError: not writable, not a log, damaged, or written by a newer draftloop.
        """
        self._path = path
        self._pid = os.getpid()
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            os.chmod(path, 0o600)  # SQLite gives the WAL and index files beside it the same mode
        except OSError as error:
            raise StorageError(f"capture log {path} cannot be opened: {error}", mend="check path and rights") from error
        with self._errors("open"):
            self._connection = sqlite3.connect(
                path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
            )
        try:
            with self._errors("open"):
                self._prepare(max_bytes)
        except StorageError:
            self._connection.close()
            raise

    def create_topic(self, topic: str, *, num_partitions: int) -> None:
        """As CaptureLog. Also raises InputError for less than one partition."""
        require_partitions(topic, num_partitions)
        with self._writing("create a topic") as connection:
            known = self._num_partitions(connection).get(topic)
            require_partitions(topic, num_partitions, known)
            if known is not None:
                return
            row = connection.execute("INSERT INTO topics (name) VALUES (?)", (topic,))
            fresh = [(row.lastrowid, number, 0) for number in range(num_partitions)]
            connection.executemany("INSERT INTO partitions VALUES (?, ?, ?)", fresh)

    def topics(self) -> dict[str, int]:
        """As CaptureLog."""
        with self._reading("list topics") as connection:
            return self._num_partitions(connection)

    def topic_id(self, topic: str) -> str:
        """As CaptureLog: the topic's number in this file, which has a number of its own."""
        with self._reading("read the identity of a topic") as connection:
            identity, _ = self._heads(connection, topic)
            file = connection.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
        return f"{file[0] & 2**64 - 1 if file else 0:016x}-{identity}"

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        """As CaptureLog: one transaction, on disk when this returns."""
        with self._writing("append") as connection:
            identity, heads = self._heads(connection, topic)
            time_ms = time.time_ns() // 1_000_000
            rows = []
            for entry in entries:
                number = partition_of(entry.key, len(heads))
                rows.append((identity, number, heads[number], time_ms, entry.key, entry.value))
                heads[number] += 1
            connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", rows)
            moved = [(offset, identity, number) for number, offset in heads.items()]
            connection.executemany("UPDATE partitions SET next_offset = ? WHERE topic = ? AND number = ?", moved)

    def start_offsets(self, topic: str) -> Offsets:
        """As CaptureLog."""
        query = "SELECT number, MIN(offset) FROM entries WHERE topic = ? GROUP BY number"
        with self._reading("read offsets") as connection:
            identity, heads = self._heads(connection, topic)
            return {**heads, **dict(connection.execute(query, (identity,)).fetchall())}

    def end_offsets(self, topic: str) -> Offsets:
        """As CaptureLog."""
        with self._reading("read offsets") as connection:
            return self._heads(connection, topic)[1]

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
        """As CaptureLog; entries below an offset never change, so pages need no common transaction."""
        with self._reading("read") as connection:
            identity, _ = self._heads(connection, topic)
        query = (
            "SELECT number, offset, time_ms, key, value FROM entries"
            " WHERE topic = ? AND number = ? AND offset >= ? AND offset < ? ORDER BY offset LIMIT ?"
        )
        while start < stop:
            with self._reading("read") as connection:
                page = connection.execute(query, (identity, partition, start, stop, READ_PAGE)).fetchall()
            for row in page:
                yield StoredEntry(*row)
            if len(page) < READ_PAGE:
                return
            start = page[-1][1] + 1

    def committed(self, group: str, topic: str) -> Offsets:
        """As CaptureLog."""
        with self._reading("read commits") as connection:
            identity, heads = self._heads(connection, topic)
            query = "SELECT number, next_offset FROM commits WHERE topic = ? AND consumer = ?"
            return {**dict.fromkeys(heads, 0), **dict(connection.execute(query, (identity, group)).fetchall())}

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """As CaptureLog."""
        with self._writing("commit") as connection:
            identity, _ = self._heads(connection, topic)
            rows = [(identity, number, group, offset) for number, offset in offsets.items()]
            connection.executemany("INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?)", rows)

    def close(self) -> None:
        """Release the file; appended entries stay. A second call does nothing."""
        with self._lock, self._errors("close"):
            self._connection.close()

    def _prepare(self, max_bytes: int | None) -> None:
        connection = self._connection
        self._enter_wal()
        connection.execute("PRAGMA synchronous = FULL")
        if max_bytes is not None:
            page_size = connection.execute("PRAGMA page_size").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_size)}")
        connection.execute("BEGIN IMMEDIATE")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('schema', ?), ('identity', random())", (SCHEMA_VERSION,))
        connection.execute("COMMIT")
        if tables and "meta" not in tables:
            raise StorageError(f"{self._path} is a SQLite file of another program", mend="give the log its own file")
        found = connection.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
        if found is None or found[0] > SCHEMA_VERSION:
            raise StorageError(
                f"capture log {self._path} has schema {found and found[0]}, this draftloop reads {SCHEMA_VERSION}",
                mend="upgrade draftloop on this side",
            )

    def _enter_wal(self) -> None:
        # Switching a fresh file to WAL needs it alone for a moment, and SQLite does not wait for that by itself.
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _reading(self, action: str) -> Iterator[sqlite3.Connection]:
        self._require_own_process()
        with self._lock, self._errors(action):
            yield self._connection

    @contextmanager
    def _writing(self, action: str) -> Iterator[sqlite3.Connection]:
        self._require_own_process()
        with self._lock, self._errors(action):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:  # a full disk may have rolled back already
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(
                f"capture log {self._path}: could not {action}: {error}", mend=self._mend(error)
            ) from error

    def _mend(self, error: sqlite3.Error) -> str:
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the class, the rest the detail
        if primary in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return "free disk space (or raise the log's size limit); the batch was not appended, no part of it"
        if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            return "give this user write access to the file and its folder"
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return "restore the file from a copy, or move it away and start a new log"
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return f"another process held the log for over {self._busy_timeout_s:g} s: find it, then try again"
        return "open the log again"

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise StorageError(
                f"capture log {self._path} was opened by process {self._pid} and used after a fork",
                mend="open the log in the process that uses it",
            )

    @staticmethod
    def _num_partitions(connection: sqlite3.Connection) -> dict[str, int]:
        query = "SELECT name, COUNT(*) FROM topics JOIN partitions ON topics.id = partitions.topic GROUP BY name"
        return dict(connection.execute(query).fetchall())

    def _heads(self, connection: sqlite3.Connection, topic: str) -> tuple[int, Offsets]:
        query = (
            "SELECT topics.id, number, next_offset FROM topics JOIN partitions ON topics.id = partitions.topic"
            " WHERE name = ? ORDER BY number"
        )
        rows = connection.execute(query, (topic,)).fetchall()
        if not rows:
            raise unknown_topic(topic, list(self._num_partitions(connection)))
        return rows[0][0], {number: offset for _, number, offset in rows}

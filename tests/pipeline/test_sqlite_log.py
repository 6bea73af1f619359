"""The SQLite log beyond the contract: processes, kills, full and read-only disks, damage."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftloop.pipeline.errors import InputError, StorageError
from draftloop.pipeline.stream.log import LogEntry
from draftloop.pipeline.stream.sqlite_log import SqliteLog

TOPIC = "draftloop.raw.tiny"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "log.sqlite"


@pytest.fixture
def log(path: Path) -> Iterator[SqliteLog]:
    opened = SqliteLog(path)
    opened.create_topic(TOPIC, num_partitions=2)
    yield opened
    opened.close()


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


OPEN = """
import os, signal, sys
from pathlib import Path
from draftloop.pipeline.stream.log import LogEntry
from draftloop.pipeline.stream.sqlite_log import SqliteLog
log = SqliteLog(Path(sys.argv[1]))
"""


def test_four_processes_opening_and_appending_at_once_lose_nothing(path: Path) -> None:
    code = (
        OPEN
        + """
log.create_topic("draftloop.raw.tiny", num_partitions=2)
for batch in range(20):
    entries = [LogEntry(f"{sys.argv[2]}-{k % 3}".encode(), f"{sys.argv[2]} {batch} {k}".encode()) for k in range(5)]
    log.append("draftloop.raw.tiny", entries)
log.close()
"""
    )
    writers = [python(code, str(path), str(number)) for number in range(4)]
    for writer in writers:
        _, complaints = writer.communicate(timeout=60)
        assert (writer.returncode, complaints) == (0, "")
    log = SqliteLog(path)
    ends = log.end_offsets(TOPIC)
    found = [entry for partition, end in ends.items() for entry in log.read(TOPIC, partition, 0, end)]
    log.close()
    assert sum(ends.values()) == 400
    for partition, end in ends.items():
        assert [entry.offset for entry in found if entry.partition == partition] == list(range(end))
    wanted = {f"{writer} {batch} {k}" for writer in range(4) for batch in range(20) for k in range(5)}
    assert {entry.value.decode() for entry in found} == wanted
    for key in {entry.key for entry in found}:
        turns = [tuple(map(int, entry.value.split())) for entry in found if entry.key == key]
        assert turns == sorted(turns)


def test_a_writer_killed_in_the_middle_of_a_batch_leaves_none_of_it(log: SqliteLog, path: Path) -> None:
    code = (
        OPEN
        + """
log.append("draftloop.raw.tiny", [LogEntry(b"k", b"whole")] * 3)
class Deadly(list):
    def __iter__(self):
        yield from list.__iter__(self)
        # The transaction is open and rows were inserted: executemany pulls from here.
        os.kill(os.getpid(), signal.SIGKILL)
rows = Deadly((1, k % 2, 100 + k, 0, b"k", b"half") for k in range(2000))
with log._writing("append") as connection:
    connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", rows)
"""
    )
    writer = python(code, str(path))
    writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL
    ends = log.end_offsets(TOPIC)
    assert [entry.value for number in ends for entry in log.read(TOPIC, number, 0, 10_000)] == [b"whole"] * 3
    log.append(TOPIC, [LogEntry(b"k", b"after")])
    assert sum(log.end_offsets(TOPIC).values()) == 4


def test_a_writer_killed_at_any_time_leaves_whole_batches_and_all_it_reported(log: SqliteLog, path: Path) -> None:
    code = (
        OPEN
        + """
for batch in range(10**6):
    log.append("draftloop.raw.tiny", [LogEntry(f"{k}".encode(), f"{batch}".encode()) for k in range(50)])
    print(batch, flush=True)
"""
    )
    writer = python(code, str(path))
    assert writer.stdout is not None
    reported = [writer.stdout.readline() for _ in range(10)]
    writer.kill()
    reported += writer.communicate(timeout=60)[0].split()
    ends = log.end_offsets(TOPIC)
    found = [entry for number, end in ends.items() for entry in log.read(TOPIC, number, 0, end)]
    batches = sorted({int(entry.value) for entry in found})
    assert len(found) == sum(ends.values()) == 50 * len(batches)
    assert batches == list(range(len(batches)))
    assert len(batches) >= int(reported[-1]) + 1


def test_a_log_reopened_has_its_entries_topics_and_commits(log: SqliteLog, path: Path) -> None:
    log.append(TOPIC, [LogEntry(b"k", b"v")] * 2)
    log.commit("curator", TOPIC, {1: 2})
    log.close()
    again = SqliteLog(path)
    assert again.topics() == {TOPIC: 2}
    assert sum(again.end_offsets(TOPIC).values()) == 2
    assert again.committed("curator", TOPIC) == {0: 0, 1: 2}
    again.close()


def test_the_files_are_for_their_owner_only(path: Path) -> None:
    path.parent.mkdir()
    path.touch(mode=0o644)
    log = SqliteLog(path)
    log.create_topic(TOPIC, num_partitions=1)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    log.close()
    assert modes == {"log.sqlite": 0o600, "log.sqlite-wal": 0o600, "log.sqlite-shm": 0o600}


def test_a_log_over_its_size_limit_refuses_the_whole_batch_and_says_so(path: Path) -> None:
    log = SqliteLog(path, max_bytes=200_000)
    log.create_topic(TOPIC, num_partitions=1)
    log.append(TOPIC, [LogEntry(b"k", b"x" * 1000)] * 10)
    with pytest.raises(StorageError, match="full") as caught:
        log.append(TOPIC, [LogEntry(b"k", b"x" * 1000)] * 500)
    assert caught.value.mend is not None
    assert "free disk space" in caught.value.mend
    assert log.end_offsets(TOPIC) == {0: 10}
    log.append(TOPIC, [LogEntry(b"k", b"still writable")])
    assert log.end_offsets(TOPIC) == {0: 11}
    log.close()


def test_a_refusing_disk_is_a_storage_error_and_loses_no_earlier_entry(log: SqliteLog, path: Path) -> None:
    log.append(TOPIC, [LogEntry(b"k", b"early")])
    code = (
        OPEN
        + """
import resource
from draftloop.pipeline.errors import StorageError
size = os.path.getsize(sys.argv[1] + "-wal")
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, size + 20_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    log.append("draftloop.raw.tiny", [LogEntry(b"k", b"x" * 5000)] * 100)
except StorageError as error:
    print(error.mend)
"""
    )
    writer = python(code, str(path))
    said, complaints = writer.communicate(timeout=60)
    assert (writer.returncode, complaints) == (0, "")
    assert "free disk space" in said
    assert sum(log.end_offsets(TOPIC).values()) == 1


def test_a_read_only_log_is_a_storage_error_that_names_the_file(log: SqliteLog, path: Path) -> None:
    log._connection.execute("PRAGMA query_only = ON")  # rights would not stop a root user
    with pytest.raises(StorageError, match=r"log\.sqlite: could not append: .*readonly") as caught:
        log.append(TOPIC, [LogEntry(b"k", b"v")])
    assert caught.value.mend == "give this user write access to the file and its folder"


def test_a_path_that_cannot_be_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be opened"):
        SqliteLog(tmp_path / "file" / "log.sqlite")
    with pytest.raises(StorageError, match="cannot be opened"):
        SqliteLog(tmp_path)


def test_a_file_that_is_no_database_is_a_storage_error(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    path.write_bytes(b"something else entirely, " * 100)
    with pytest.raises(StorageError, match="not a database") as caught:
        SqliteLog(path)
    assert caught.value.mend is not None
    assert "restore" in caught.value.mend


def test_a_damaged_page_is_a_storage_error_on_read(log: SqliteLog, path: Path) -> None:
    log.append(TOPIC, [LogEntry(b"k", os.urandom(3000)) for _ in range(100)])
    log.close()
    body = bytearray(path.read_bytes())
    body[4096 * 8 :] = os.urandom(len(body) - 4096 * 8)
    path.write_bytes(body)
    again = SqliteLog(path)
    with pytest.raises(StorageError, match="malformed"):
        [list(again.read(TOPIC, partition, 0, 100)) for partition in (0, 1)]
    again.close()


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE recipes (name TEXT)")
    other.close()
    with pytest.raises(StorageError, match="another program"):
        SqliteLog(path)


def test_a_log_of_a_newer_draftloop_is_refused(log: SqliteLog, path: Path) -> None:
    log._connection.execute("UPDATE meta SET value = 2 WHERE name = 'schema'")
    log.close()
    with pytest.raises(StorageError, match="schema 2, this draftloop reads 1"):
        SqliteLog(path)


def test_a_writer_that_waits_too_long_says_who_to_look_for(log: SqliteLog, path: Path) -> None:
    hasty = SqliteLog(path, busy_timeout_s=0.05)
    log._connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="locked") as caught:
        hasty.append(TOPIC, [LogEntry(b"k", b"v")])
    log._connection.execute("ROLLBACK")
    assert caught.value.mend == "another process held the log for over 0.05 s: find it, then try again"
    hasty.append(TOPIC, [LogEntry(b"k", b"v")])
    hasty.close()


def test_a_log_used_after_close_is_a_storage_error(log: SqliteLog) -> None:
    log.close()
    log.close()
    with pytest.raises(StorageError, match="closed"):
        log.append(TOPIC, [LogEntry(b"k", b"v")])


def test_a_log_used_after_a_fork_is_a_storage_error(log: SqliteLog, path: Path) -> None:
    # In a process of its own: forking this one, which has threads, would not be safe.
    code = (
        OPEN
        + """
from draftloop.pipeline.errors import StorageError
child = os.fork()
try:
    log.append("draftloop.raw.tiny", [])
except StorageError as error:
    print(error.message, flush=True)
if child:
    os.waitpid(child, 0)
os._exit(0)
"""
    )
    said, complaints = python(code, str(path)).communicate(timeout=60)
    assert complaints == ""
    assert len(said.splitlines()) == 1
    assert "used after a fork" in said


def test_threads_share_one_log(log: SqliteLog) -> None:
    def write(number: int) -> None:
        for batch in range(20):
            log.append(TOPIC, [LogEntry(f"{number}".encode(), f"{batch}".encode())])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(log.end_offsets(TOPIC).values()) == 80


def test_a_topic_needs_a_partition(log: SqliteLog) -> None:
    with pytest.raises(InputError, match="with 0 partitions"):
        log.create_topic("empty", num_partitions=0)


def test_offsets_of_erased_entries_are_not_given_again(log: SqliteLog) -> None:
    log.create_topic("single", num_partitions=1)
    log.append("single", [LogEntry(b"k", b"v")] * 3)
    log._connection.execute("DELETE FROM entries")
    log.append("single", [LogEntry(b"k", b"new")])
    assert [(entry.offset, entry.value) for entry in log.read("single", 0, 0, 10)] == [(3, b"new")]

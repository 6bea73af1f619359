"""The curation benchmark: repeatable entries, a process per measurement, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftloop.pipeline.data import bench_curate as module
from draftloop.pipeline.data.bench_curate import SyntheticLog, bench_curate, table
from draftloop.pipeline.errors import InputError, StorageError
from draftloop.pipeline.records import decode

TOPIC = "draftloop.raw.bench"


def test_the_synthetic_log_is_the_same_every_time_and_dense() -> None:
    logs = [SyntheticLog(TOPIC, 1001, 60) for _ in range(2)]
    assert logs[0].end_offsets(TOPIC) == {0: 251, 1: 250, 2: 250, 3: 250}
    entries = [list(log.read(TOPIC, 2, 100, 250)) for log in logs]
    assert entries[0] == entries[1]
    assert [entry.offset for entry in entries[0]] == list(range(100, 250))


def test_a_synthetic_record_has_the_size_asked_for() -> None:
    record = decode(SyntheticLog(TOPIC, 10, 950).value(3))
    assert len(record.prompt_ids + record.output_ids) == 4 * 950
    assert 3900 < len(SyntheticLog(TOPIC, 10, 950).value(3)) < 4700


def test_both_logs_give_the_same_snapshot_and_nothing_is_left(tmp_path: Path) -> None:
    results = {log: bench_curate(tmp_path, sizes=(1000,), record_tokens=30, log=log) for log in ("synthetic", "sqlite")}
    assert list(tmp_path.iterdir()) == []
    runs = {log: result["runs"][0]["curate"] for log, result in results.items()}
    assert runs["synthetic"]["counts"] == {
        "captured": 1000,
        "kept": 968,
        "rejected": {
            "aborted": 10,
            "duplicate_content": 10,
            "duplicate_record": 10,
            "newer_schema": 1,
            "undecodable": 1,
        },
        "carried": {"train": 0, "heldout": 0},
    }
    assert runs["synthetic"]["snapshot"] == runs["sqlite"]["snapshot"]
    assert 20 < results["synthetic"]["peak_rss_mb"] < 400
    assert results["synthetic"]["size_ratio"] == 1
    assert results["synthetic"]["runs"][0]["decode"]["refused"] == 2
    assert "1 times the records took 1.00 times the time" in table(results["synthetic"])


def test_the_module_prints_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", module.__name__, "--json", "--sizes", "100,200", "--record-tokens", "20"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert [run["records"] for run in result["runs"]] == [100, 200]
    assert result["size_ratio"] == 2
    assert "curate of 200 records" in done.stderr


def test_a_disk_too_small_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"curating 1000000000 records needs about 13200.0 GB"):
        bench_curate(tmp_path, sizes=(10**9,))
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"measuring fill of 10 records failed: .*nowhere"):
        bench_curate(tmp_path, sizes=(10,), log=str(tmp_path / "nowhere.toml"))


@pytest.mark.slow
def test_ten_times_the_records_take_the_same_memory_and_at_most_eleven_times_the_work(tmp_path: Path) -> None:
    result = bench_curate(tmp_path, sizes=(20_000, 200_000), record_tokens=300, rounds=3)
    small, large = (run["curate"] for run in result["runs"])
    assert large["peak_rss_mb"] - small["peak_rss_mb"] < 100  # SQLite fills its cache of 64 MB
    assert result["peak_rss_mb"] < 400
    assert result["cpu_ratio"] < 11  # CPU: the wall clock of a test machine is not to be trusted

"""What a curation costs by size: seconds, memory and throughput of one window, each size in a process of its own.

`python -m draftloop.pipeline.data.bench_curate --json` prints the whole comparison. Beside each curation stands the
plain limit: the same entries read and decoded, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftloop.pipeline.data.curate import CurateConfig, Window, curate, pending_window, publish_curated
from draftloop.pipeline.errors import DraftloopError, InputError, StorageError, UndecodableRecordError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.records import CapturedRequest, Consent, Sampling, decode, encode
from draftloop.pipeline.stream.kafka_config import read_client
from draftloop.pipeline.stream.log import CaptureLog, LogEntry, MemoryLog, Offsets, StoredEntry
from draftloop.pipeline.stream.sqlite_log import SqliteLog

Part = Literal["fill", "decode", "curate"]
GROUP = "draftloop.curator.bench"
NUM_PARTITIONS = 4
VOCAB_SIZE = 49_152
RECORD_TOKENS = 950  # about 4.1 KB with everything around them
PROMPT_SHARE = 2 / 3
LATER_SCHEMA = b"\x81\xa6schema\x63"
TENANTS = ("acme", "globex", "initech")
FINGERPRINT = Fingerprint(
    weights_digest="0" * 64,
    tokenizer_digest="0" * 64,
    template_digest="0" * 64,
    vocab_size=VOCAB_SIZE,
    padded_vocab_size=VOCAB_SIZE,
    hidden_size=576,
    num_layers=30,
    tap_layers=(2, 15, 27),
    dtype="bfloat16",
    quantization="none",
    max_position_embeddings=8192,
    rope_theta=10000.0,
)
TARGET = FINGERPRINT.digest
CONFIG = CurateConfig(min_output_tokens=1)


class SyntheticLog(MemoryLog):
    """Entries made as they are read, the same every time.

    1 % redelivered, 1 % of repeated content, 1 % aborted, 0.2 % not decodable, three tenants, conversations of 3 turns.
    """

    def __init__(self, topic: str, num_entries: int, record_tokens: int) -> None:
        super().__init__()
        self.create_topic(topic, num_partitions=NUM_PARTITIONS)
        self._num_entries = num_entries
        self._record_tokens = record_tokens
        # One pool for all: numbers drawn per record would cost more than the curation.
        self._pool = np.random.default_rng(0).integers(0, VOCAB_SIZE, record_tokens + 65_536, dtype="<u4").tobytes()

    def end_offsets(self, topic: str) -> Offsets:
        counts = divmod(self._num_entries, NUM_PARTITIONS)
        return {number: counts[0] + (number < counts[1]) for number in range(NUM_PARTITIONS)}

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[StoredEntry]:
        for offset in range(start, stop):
            yield StoredEntry(partition, offset, offset, b"", self.value(offset * NUM_PARTITIONS + partition))

    def value(self, number: int) -> bytes:
        """The bytes of one entry."""
        kind = number % 100
        named = number - 5 if kind == 50 else number  # redelivered
        text = number - 5 if kind == 60 else named  # another id, the same content
        value = encode(self._record(named, text, aborted=kind == 70))
        if number % 1000 == 998:
            return value[: len(value) // 2]
        return LATER_SCHEMA if number % 1000 == 999 else value

    def _record(self, number: int, text: int, *, aborted: bool) -> CapturedRequest:
        num_prompt = int(self._record_tokens * PROMPT_SHARE)
        num_output = self._record_tokens - num_prompt
        start = 4 * (text * 7919 % 65_536)
        own = (text % VOCAB_SIZE).to_bytes(4, "little") + (text // VOCAB_SIZE).to_bytes(4, "little")
        conversation = f"conversation-{number // 12:012d}-{number % 4}"
        return CapturedRequest(
            record_id=f"0192f0c1-{number:012x}-7000-8000",
            time_ms=number,
            conversation_id=conversation,
            tenant=TENANTS[number % 3],
            subject=f"{number % 997:032x}",
            consent=Consent(purpose="train", policy_version="2026-10", basis="tenant-policy"),
            target=TARGET,
            drafter_version="7",
            prompt_ids=own + self._pool[start : start + 4 * (num_prompt - 2)],
            output_ids=self._pool[start + 4 * num_prompt : start + 4 * (num_prompt + num_output)],
            finish_reason="abort" if aborted else "stop",
            sampling=Sampling(temperature=0.7, max_tokens=1024),
            accepted=(2,) * (num_output // 3),
            drafted=(4,) * (num_output // 3),
            slices={"domain": f"domain-{number % 7}", "language": "en"},
        )


def bench_curate(
    folder: Path,
    *,
    sizes: Sequence[int] = (100_000, 1_000_000),
    record_tokens: int = RECORD_TOKENS,
    log: str = "synthetic",
    rounds: int = 1,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Curate a window of each size and say seconds, peak memory and throughput beside the plain read and decode.

    `log`: "synthetic", "sqlite", or the path of a Kafka client file (its principal must be allowed to create, write
    and read; the topics stay). Of several `rounds` the least disturbed one counts. Needs about three times the largest
    window in `folder` for the time of the call.
    Raises StorageError where that is not there, InputError where a measurement fails.
    """
    _require_room(folder, max(sizes), record_tokens)
    runs = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="bench-curate-", dir=folder) as work:
            parts: tuple[Part, ...] = ("decode", "curate") if log == "synthetic" else ("fill", "decode", "curate")
            run: dict[str, Any] = {"records": size}
            for part in parts:
                tries = [
                    _measure(part, Path(work), size, record_tokens, log) for _ in range(1 if part == "fill" else rounds)
                ]
                run[part] = min(tries, key=lambda one: one["seconds"])
                if say is not None:
                    say(f"{part} of {size} records: {run[part]['seconds']:.1f} s, {run[part]['peak_rss_mb']} MB")
            runs.append(run)
    first, last = runs[0], runs[-1]
    return {
        "log": log,
        "record_tokens": record_tokens,
        "rounds": rounds,
        "runs": runs,
        "peak_rss_mb": max(run["curate"]["peak_rss_mb"] for run in runs),
        "size_ratio": last["records"] / first["records"],
        "time_ratio": round(last["curate"]["seconds"] / first["curate"]["seconds"], 3),
        "cpu_ratio": round(last["curate"]["cpu_s"] / first["curate"]["cpu_s"], 3),  # the same on a busy machine
    }


def table(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [f"log {result['log']}, {result['record_tokens']} tokens a record, best of {result['rounds']}"]
    for run in result["runs"]:
        for part in ("decode", "curate"):
            one = run[part]
            lines.append(
                f"{run['records']:>9} records  {part:<7} {one['seconds']:>8.1f} s"
                f"  {one['us_per_record']:>6.1f} us/record  {one['mb_per_s']:>6.1f} MB/s  peak {one['peak_rss_mb']} MB"
            )
    lines.append(
        f"{result['size_ratio']:g} times the records took {result['time_ratio']:.2f} times the time"
        f" and {result['cpu_ratio']:.2f} times the CPU"
    )
    return "\n".join(lines)


def _require_room(folder: Path, size: int, record_tokens: int) -> None:
    needed = 3 * size * (4 * record_tokens + 600)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"curating {size} records needs about {needed / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are free",
            mend="free disk space, give another folder, or a smaller size",
        )


def _measure(part: Part, work: Path, size: int, record_tokens: int, log: str) -> dict[str, Any]:
    module = __spec__.name if __spec__ is not None else __name__
    given = ["--part", part, "--folder", str(work), "--sizes", str(size), "--record-tokens", str(record_tokens)]
    command = [sys.executable, "-m", module, *given, "--log", log]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip()[-500:] or f"exit code {done.returncode}"
        raise InputError(f"measuring {part} of {size} records failed: {reason}", mend=f"alone: {' '.join(command)}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _run_part(part: Part, work: Path, size: int, record_tokens: int, log_name: str) -> dict[str, Any]:
    """One measurement, in this process."""
    topic = f"draftloop.raw.bench-curate-{size}-{record_tokens}"
    log = _open(log_name, work, topic, size, record_tokens)
    began, used = time.perf_counter(), time.process_time()
    try:
        if part == "fill":
            found = _fill(log, topic, size, record_tokens)
        else:
            window = pending_window(log, topic, GROUP)
            found = _decode(log, window) if part == "decode" else _curate(log, window, work)
    finally:
        log.close()
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - used
    num_bytes = size * len(SyntheticLog(topic, 1, record_tokens).value(0))
    return {
        "seconds": round(seconds, 3),
        "cpu_s": round(cpu_s, 3),
        "us_per_record": round(1e6 * seconds / size, 2),
        "mb_per_s": round(num_bytes / 1e6 / seconds, 1),
        "peak_rss_mb": peak_rss_mb(),
        **found,
    }


def _open(name: str, work: Path, topic: str, size: int, record_tokens: int) -> CaptureLog:
    if name == "synthetic":
        return SyntheticLog(topic, size, record_tokens)
    if name == "sqlite":
        return SqliteLog(work / "log.sqlite")
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    return KafkaLog(read_client(Path(name)))


def _fill(log: CaptureLog, topic: str, size: int, record_tokens: int) -> dict[str, Any]:
    log.create_topic(topic, num_partitions=NUM_PARTITIONS)
    source = SyntheticLog(topic, size, record_tokens)
    for start in range(sum(log.end_offsets(topic).values()), size, 1000):  # a Kafka topic may be there from before
        batch = range(start, min(start + 1000, size))
        log.append(topic, [LogEntry(f"{number // 12}".encode(), source.value(number)) for number in batch])
    return {}


def _decode(log: CaptureLog, window: Window) -> dict[str, Any]:
    refused = 0
    for partition, stop in window.stop.items():
        for entry in log.read(window.topic, partition, window.start.get(partition, 0), stop):
            try:
                decode(entry.value)
            except (UndecodableRecordError, InputError):
                refused += 1
    return {"refused": refused}


def _curate(log: CaptureLog, window: Window, work: Path) -> dict[str, Any]:
    marks = [time.perf_counter()]
    last = {"read": 0.0}

    def read(done: int, total: int) -> None:
        last["read"] = time.perf_counter()

    root = work / "snapshots"
    with curate(log, window, beside=root, fingerprint=FINGERPRINT, config=CONFIG, on_progress=read) as curated:
        marks.append(time.perf_counter())
        snapshot = publish_curated(root, curated, fingerprint=FINGERPRINT)
    ended = time.perf_counter()
    num_bytes = sum(path.stat().st_size for path in snapshot.folder.rglob("*") if path.is_file())
    shutil.rmtree(root)
    return {
        "read_s": round(last["read"] - marks[0], 3),
        "decide_s": round(marks[1] - last["read"], 3),
        "write_s": round(ended - marks[1], 3),
        "snapshot": snapshot.id,
        "snapshot_mb": round(num_bytes / 1e6, 1),
        "counts": curated.counts,
    }


def peak_rss_mb() -> float:
    """The most memory this process has held, MiB."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)  # bytes on macOS
    # Not ru_maxrss: there a child begins with what its parent held.
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return round(int(line.split()[1]) / 1024, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of the module; returns the exit code."""
    parser = argparse.ArgumentParser(description=bench_curate.__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the files go")
    parser.add_argument("--sizes", default="100000,1000000", help="records, comma-separated")
    parser.add_argument("--record-tokens", type=int, default=RECORD_TOKENS, help="token ids a record")
    parser.add_argument("--log", default="synthetic", help="synthetic, sqlite, or a Kafka client file")
    parser.add_argument("--rounds", type=int, default=1, help="times each is measured; the fastest counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--part", choices=("fill", "decode", "curate"), help="one measurement in this process")
    given = parser.parse_args(arguments)
    sizes = [int(size) for size in given.sizes.split(",")]
    try:
        if given.part:
            print(json.dumps(_run_part(given.part, given.folder, sizes[0], given.record_tokens, given.log)))
            return 0
        result = bench_curate(
            given.folder,
            sizes=sizes,
            record_tokens=given.record_tokens,
            log=given.log,
            rounds=given.rounds,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except DraftloopError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(result) if given.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

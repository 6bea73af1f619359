"""The end of a process and the fork of one: everything is delivered or counted, in bounded time (A28)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

PRELUDE = """
import json, os, signal, sys, threading, time
from pathlib import Path
from draftloop.pipeline.records import Sampling
from draftloop.pipeline.stream.policy import ConsentPolicy, TenantConsent
from draftloop.pipeline.stream.sqlite_log import SqliteLog
from draftloop.serving_hooks.at_exit import close_at_exit
from draftloop.serving_hooks.capture import CaptureHook, CaptureLimits, FinishedRequest

folder = Path(sys.argv[1])
log = SqliteLog(folder / "log.db")
log.create_topic("t", num_partitions=1)
POLICY = ConsentPolicy(version="1", tenants={"acme": TenantConsent()})

def hook_on(open_log=lambda: log, **limits):
    return CaptureHook(open_log, topic="t", policy=POLICY, target="t", limits=CaptureLimits(**limits))

def offer(hook, count, prefix="r"):
    for index in range(count):
        name = f"{prefix}{index}"
        hook.offer(FinishedRequest(name, name, "acme", "s", [1, 2], [3], "stop", Sampling()))

def report(counters):
    (folder / "counters.json").write_text(json.dumps({**counters, "pid": os.getpid()}))

class Hanging:
    def append(self, topic, entries):
        (folder / "entered").touch()
        time.sleep(3600)
    def close(self):
        pass
"""


def start(folder: Path, body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "error", "-c", PRELUDE + body, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def counters_in(folder: Path) -> dict[str, int]:
    counters: dict[str, int] = json.loads((folder / "counters.json").read_text())
    dropped = sum(count for name, count in counters.items() if name.startswith("dropped."))
    assert counters["offered"] == counters["delivered"] + dropped + counters["in_queue"]
    assert counters["in_queue"] == 0
    return counters


def test_a_hundred_sent_and_terminated_are_a_hundred_delivered(tmp_path: Path) -> None:
    body = """
hook = hook_on(linger_s=30.0, batch_records=1000)
close_at_exit(hook, 5.0, report=report)
offer(hook, 100)
print("offered", flush=True)
time.sleep(60)
"""
    with start(tmp_path, body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "offered\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (143, "")
    assert counters_in(tmp_path)["delivered"] == 100


def test_terminated_while_the_log_hangs_it_leaves_in_bounded_time_and_counts(tmp_path: Path) -> None:
    body = """
hook = hook_on(lambda: Hanging(), batch_records=30)
close_at_exit(hook, 0.5, report=report)
offer(hook, 100)
while not (folder / "entered").exists():
    time.sleep(0.01)
print("offered", flush=True)
time.sleep(60)
"""
    with start(tmp_path, body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "offered\n"
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - started < 5
    assert (process.returncode, errors) == (143, "")
    counters = counters_in(tmp_path)
    assert (counters["dropped.unknown_at_exit"], counters["dropped.closed"]) == (30, 70)


def test_a_plain_end_of_the_program_delivers_too(tmp_path: Path) -> None:
    body = """
hook = hook_on(linger_s=30.0)
close_at_exit(hook, 5.0, report=report)
offer(hook, 10)
"""
    with start(tmp_path, body) as process:
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0
    assert counters_in(tmp_path)["delivered"] == 10


def test_a_handler_of_the_engine_is_not_stolen(tmp_path: Path) -> None:
    body = """
def own(number, frame):
    print("the engine's own", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, own)
hook = hook_on()
close_at_exit(hook, 5.0, report=report)
assert signal.getsignal(signal.SIGTERM) is own
offer(hook, 10)
os.kill(os.getpid(), signal.SIGTERM)
"""
    with start(tmp_path, body) as process:
        assert process.communicate(timeout=20) == ("the engine's own\n", "")
    assert process.returncode == 7
    assert counters_in(tmp_path)["delivered"] == 10


def test_outside_the_main_thread_no_handler_is_set(tmp_path: Path) -> None:
    body = """
hook = hook_on()
thread = threading.Thread(target=close_at_exit, args=(hook, 5.0), kwargs={"report": report})
thread.start()
thread.join()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
offer(hook, 10)
"""
    with start(tmp_path, body) as process:
        assert process.communicate(timeout=20) == ("", "")
    assert counters_in(tmp_path)["delivered"] == 10


def test_a_second_signal_does_not_cut_the_account_short(tmp_path: Path) -> None:
    body = """
hook = hook_on(lambda: Hanging())
close_at_exit(hook, 1.0, report=report)
offer(hook, 10)
timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
timer.daemon = True
timer.start()
os.kill(os.getpid(), signal.SIGTERM)
"""
    with start(tmp_path, body) as process:
        assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 143
    assert counters_in(tmp_path)["offered"] == 10


FORK = """
def in_child(check):
    pid = os.fork()
    if pid == 0:
        try:
            check()
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    for _ in range(1000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"
"""


def test_a_child_forked_in_mid_traffic_neither_hangs_nor_sends(tmp_path: Path) -> None:
    body = (
        FORK
        + """
hook = hook_on(linger_s=0.001)
offer(hook, 5)
stop = threading.Event()
def traffic():
    while not stop.is_set():
        offer(hook, 1, "x")
        hook.counters()
threads = [threading.Thread(target=traffic) for _ in range(2)]
for thread in threads:
    thread.start()
def check():
    assert hook.counters()["offered"] == 0, hook.counters()
    offer(hook, 3, "child")
    assert hook.counters() == {"offered": 3, "delivered": 0, "in_queue": 0, "queue_bytes": 0, "send_errors": 0,
                               "dropped.forked": 3}, hook.counters()
    assert hook.flush(1) and hook.close(1)
    assert threading.active_count() == 1
ends = [in_child(check) for _ in range(30)]
stop.set()
for thread in threads:
    thread.join()
assert ends == [0] * 30, ends
assert hook.close(10)
report(hook.counters())
names = [entry.key for entry in SqliteLog(folder / "log.db").read("t", 0, 0, 10**9)]
assert len(names) == hook.counters()["delivered"]
assert not any(name.startswith(b"child") for name in names)
"""
    )
    with start(tmp_path, body) as process:
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    counters_in(tmp_path)


def test_a_child_forked_before_the_first_record_has_a_hook_of_its_own(tmp_path: Path) -> None:
    body = (
        FORK
        + """
hook = hook_on(lambda: SqliteLog(folder / "log.db"), linger_s=0.001)
def check():
    offer(hook, 3, "child")
    assert hook.close(5)
    assert hook.counters()["delivered"] == 3, hook.counters()
assert in_child(check) == 0
offer(hook, 2)
assert hook.close(5)
report(hook.counters())
"""
    )
    with start(tmp_path, body) as process:
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    assert counters_in(tmp_path)["delivered"] == 2

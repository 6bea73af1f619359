"""One Java process: finding Java, starting it apart from us, and telling it from any other process for ever after."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from draftloop.pipeline.errors import JavaNotFoundError, LocalBrokerError

MIN_JAVA = 17
KAFKA_MAIN = "kafka.Kafka"
FORMAT_MAIN = "kafka.tools.StorageTool"
KILLED_WAIT_S = 10.0  # after SIGKILL only the kernel is still at work
_MAIN_CLASSES = {KAFKA_MAIN, FORMAT_MAIN}
_JAVA_MEND = f"install a Java runtime of version {MIN_JAVA} or newer, or point $JAVA_HOME at one"
# Java decodes file names by its locale; nothing else of our environment is its business.
_ENVIRONMENT = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}


class ProcessIdentity(NamedTuple):
    """A process number and when it began: together they never come back, a number alone does."""

    pid: int
    started: str


def find_java(environ: Mapping[str, str]) -> Path:
    """The `java` of $JAVA_HOME, else of $PATH. Raises JavaNotFoundError where it is missing or older than 17."""
    if environ.get("JAVA_HOME"):
        java = Path(environ["JAVA_HOME"]) / "bin" / "java"
        if not os.access(java, os.X_OK):
            raise JavaNotFoundError(f"$JAVA_HOME: {java} is not there", mend=_JAVA_MEND)
    else:
        found = shutil.which("java", path=environ.get("PATH", os.defpath))
        if found is None:
            raise JavaNotFoundError("no `java` on the path; a local Kafka needs it", mend=_JAVA_MEND)
        java = Path(found)
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaNotFoundError(f"{java} does not run: {type(error).__name__}", mend=_JAVA_MEND) from error
    version = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    if done.returncode or version is None:
        raise JavaNotFoundError(f"{java} -version ended with {done.returncode} and no version", mend=_JAVA_MEND)
    if int(version[1]) < MIN_JAVA:
        raise JavaNotFoundError(f"{java} is Java {version[1]}; Kafka needs {MIN_JAVA}", mend=_JAVA_MEND)
    return java


def run_java(java: Path, arguments: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a Java program to its end, stdout and stderr together. Raises LocalBrokerError where it does not end."""
    try:
        return subprocess.run(
            [java, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=_ENVIRONMENT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalBrokerError(
            f"{java} did not finish: {type(error).__name__}", mend="look at the machine's load"
        ) from error


def spawn_java(java: Path, arguments: Sequence[str], *, log: Path) -> ProcessIdentity:
    """Start a Java program in a session of its own, output appended to `log`. Raises LocalBrokerError.

    The session keeps a terminal's Ctrl-C from it. It is not held as a Popen object: it outlives us by design.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        pid = os.posix_spawn(
            java,
            [str(java), *arguments],
            _ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP),
        )
    except OSError as error:
        raise LocalBrokerError(f"{java} did not start: {error}", mend="check the log file's folder and Java") from error
    return ProcessIdentity(pid, _stat(pid)[1])  # an ended child has its entry until we ask for it


def started_at(pid: int) -> str | None:
    """Boot and tick a running process began at; None where there is no such process (or only its remains)."""
    state, started = _stat(pid)
    return None if state in "ZX" else started


def runs(process: ProcessIdentity) -> bool:
    """Whether this very process runs, not another of its number. An ended child of ours is let go."""
    state, started = _stat(process.pid)
    if started != process.started:
        return False
    if state in "ZX":
        _reap(process.pid)
        return False
    return True


def java_of(settings: Path) -> list[ProcessIdentity]:
    """Every Kafka or Kafka tool that runs on this very settings file, known to us or not."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="surrogateescape").rstrip("\0").split("\0")
        except OSError:  # ended meanwhile
            continue
        if not _MAIN_CLASSES.isdisjoint(words) and os.path.realpath(words[-1]) == os.path.realpath(settings):
            pid = int(file.parent.name)
            started = started_at(pid)
            if started is not None:
                found.append(ProcessIdentity(pid, started))
    return found


def uptime_s(process: ProcessIdentity) -> float:
    """Seconds since the process began."""
    ticks = int(process.started.rpartition("/")[2])
    now = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, now - ticks / os.sysconf("SC_CLK_TCK"))


def resident_mb(process: ProcessIdentity) -> float:
    """Memory the process holds, in MB; 0 where it is gone."""
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def stop(process: ProcessIdentity, *, wait_s: float) -> bool:
    """SIGTERM, wait, then SIGKILL. False: this process ran no longer. Raises LocalBrokerError where it stays.

    Signals go through a file descriptor of the process: what is checked is what is hit, whatever happens between.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not runs(process):
            return False
        for number, patience in ((signal.SIGTERM, wait_s), (signal.SIGKILL, KILLED_WAIT_S)):
            try:
                signal.pidfd_send_signal(handle, number)
                signal.pidfd_send_signal(handle, signal.SIGCONT)  # a frozen process would not hear of it
            except ProcessLookupError:
                break
            except PermissionError as error:
                raise LocalBrokerError(
                    f"process {process.pid} belongs to another user", mend="stop the broker as the user who started it"
                ) from error
            if _ended(handle, patience):
                break
        else:
            raise LocalBrokerError(f"process {process.pid} outlives SIGKILL", mend="is it under a debugger?")
    finally:
        os.close(handle)
        runs(process)
    return True


def _stat(pid: int) -> tuple[str, str]:
    """State letter and beginning of a process; ("X", "") where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    return fields[0], f"{boot}/{fields[19]}"


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # started by a process before us


def _ended(handle: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    deadline = time.monotonic() + wait_s
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            return True
    return False

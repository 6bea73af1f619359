"""Makes a moment as long as a test needs: the engine's processes stand still while its API server goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from live_site import LiveServer


@contextmanager
def stopped_workers(live: LiveServer) -> Iterator[None]:
    """Engine core and workers stand still, at the latest until the end of the block."""
    _tell(live, signal.SIGSTOP)
    try:
        yield
    finally:
        resume_workers(live)


def resume_workers(live: LiveServer) -> None:
    """They go on. Twice is once."""
    _tell(live, signal.SIGCONT)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Fails when it takes longer."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)


def _tell(live: LiveServer, number: signal.Signals) -> None:
    for pid in live.server.processes():
        if pid != live.server.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

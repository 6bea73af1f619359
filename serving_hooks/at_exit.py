"""The end of a process: what the hook still holds is delivered or counted, in bounded time, on SIGTERM too."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType

from draftloop.serving_hooks.capture import CaptureHook

_log = logging.getLogger("draftloop.capture")


def close_at_exit(
    hook: CaptureHook,
    timeout_s: float,
    *,
    before: Callable[[], None] = lambda: None,
    report: Callable[[dict[str, int]], None] | None = None,
) -> None:
    """Close the hook when the interpreter exits, and hand the final counters to `report` (default: one log line).

    before: offers what has not been yet.

    Called from the main thread where SIGTERM still kills the process, it lets SIGTERM end the program by
    SystemExit(143) instead: `finally` blocks run, non-daemon threads are waited for, then the hook is closed. A handler
    that the engine has set, or sets later, stays: the engine's own way out then ends in the same place.
    """

    def close() -> None:
        # A second one must not cut the account short; an event loop that has ended leaves the default behind.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) in (_leave, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        before()
        hook.close(timeout_s)
        (report or _report)(hook.counters())

    atexit.register(close)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _report(counters: dict[str, int]) -> None:
    _log.info("capture ended: %s", counters)

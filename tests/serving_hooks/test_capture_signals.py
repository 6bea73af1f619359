"""A signal handler that raises (SIGTERM, Ctrl-C) inside an offer: the account stays exact, the lock is let go."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from types import FrameType
from typing import Any

from draftloop.pipeline.records import Sampling
from draftloop.pipeline.stream.policy import ConsentPolicy, TenantConsent
from draftloop.serving_hooks.capture import CaptureHook, CaptureLimits, FinishedRequest

POLICY = ConsentPolicy(version="1", tenants={"acme": TenantConsent()})


class Interrupted(BaseException):
    """As SystemExit and KeyboardInterrupt are: no Exception."""


class Fast:
    def append(self, topic: str, entries: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_offer_cut_off_anywhere_keeps_the_account_exact() -> None:
    armed = threading.Event()  # while it is set, a signal is caught: one at a time, and none around the loop

    def interrupt(number: int, frame: FrameType | None) -> None:
        if armed.is_set():
            armed.clear()
            raise Interrupted

    hook = CaptureHook(Fast, topic="t", policy=POLICY, target="t", limits=CaptureLimits(max_records=50, linger_s=0.001))
    offers = [FinishedRequest(f"{who}", "c", who, "s", [1], [2], "stop", Sampling()) for who in ("acme", "nobody")]
    stop = threading.Event()

    def disturb() -> None:
        chooser = random.Random(3)
        while not stop.is_set():
            armed.wait(1)
            time.sleep(chooser.uniform(0.0001, 0.001))
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    disturber = threading.Thread(target=disturb, daemon=True)
    deadline = time.monotonic() + 4
    started = cut = 0
    try:
        disturber.start()
        while not stop.is_set():
            try:
                armed.set()
                while time.monotonic() < deadline:
                    started += 1
                    hook.offer(offers[started % 2])
                armed.clear()
                stop.set()
            except Interrupted:
                cut += 1
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        stop.set()
    disturber.join(5)
    signal.signal(signal.SIGUSR1, before)
    assert hook.close(5)
    counters = hook.counters()
    dropped = sum(count for name, count in counters.items() if name.startswith("dropped."))
    assert counters["offered"] == counters["delivered"] + dropped
    assert started - cut <= counters["offered"] <= started
    assert cut > 100

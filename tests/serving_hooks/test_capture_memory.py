"""The byte bound is memory: what the process grows by while the log is away, and what an offer costs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, threading, time
from draftloop.pipeline.stream.load import LoadPlan, POLICY, memory_mb
from draftloop.pipeline.stream import load
from draftloop.serving_hooks.capture import CaptureHook, CaptureLimits

class Hanging:
    def append(self, topic, entries):
        time.sleep(3600)
    def close(self):
        pass

max_mb, num_ids = int(sys.argv[1]), int(sys.argv[2])
limits = CaptureLimits(max_bytes=max_mb * 2**20, max_records=10**7)
hook = CaptureHook(Hanging, topic="t", policy=POLICY, target="t", limits=limits)
make = load.requests_of(LoadPlan(num_ids=num_ids))
before = memory_mb("VmRSS")
index = 0
while not hook.counters().get("dropped.queue_full_bytes"):
    hook.offer(make(index))
    index += 1
for extra in range(20_000):
    hook.offer(make(index))
print(json.dumps({"grown": memory_mb("VmHWM") - before, **hook.counters()}))
hook.close(0)
"""


@pytest.mark.parametrize(("max_mb", "num_ids"), [(16, 1000), (64, 1000), (16, 4), (16, 100_000)])
def test_a_full_queue_takes_the_memory_it_is_allowed(max_mb: int, num_ids: int) -> None:
    """Both ways: not more, and not so much less that the bound would say nothing."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(max_mb), str(num_ids)], capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    assert seen["queue_bytes"] <= max_mb * 2**20
    assert 0.8 * max_mb < seen["grown"] < 1.02 * max_mb + 2  # two threads with their stacks and heaps

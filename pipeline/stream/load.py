"""A serving process in small: finished requests at a fixed rate into a capture hook, and what its caller sees of it.

`python -m draftloop.pipeline.stream.load --client FILE.toml --topic TOPIC` prints one JSON object. Fault tests stop the
broker meanwhile; `draftloop bench capture` runs it as it is.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from draftloop.pipeline.records import Sampling
from draftloop.pipeline.stream.policy import ConsentPolicy, TenantConsent
from draftloop.serving_hooks.capture import CaptureHook, FinishedRequest
from draftloop.serving_hooks.sender import Sink

TENANT = "load"
POLICY = ConsentPolicy(version="load", tenants={TENANT: TenantConsent()})
OUTPUT_SHARE = 4  # one id in four is an output id


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is offered."""

    rate: float = 500.0  # offers a second
    seconds: float = 30.0
    num_ids: int = 1000  # token ids of a request: 4 bytes each
    run: str = "load"  # request ids are RUN-0, RUN-1, ...
    busy: float = 0.0  # share of the time between offers that the caller computes in Python
    close_s: float = 10.0


class Spread(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p99: float
    p999: float
    max: float


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the calling thread saw, what the process took, and what became of the records."""

    offered: int
    seconds: float
    offer_ms: Spread  # time inside the hook
    late_ms: Spread  # how far behind its time an offer began: sleep, scheduling and the interpreter's lock
    rss_before_mb: float
    rss_peak_mb: float
    close_s: float
    closed_clean: bool
    counters: dict[str, int]
    last_error: str | None


def drive(hook: CaptureHook, plan: LoadPlan) -> LoadResult:
    """Offer by the plan from this thread, then close the hook."""
    requests = requests_of(plan)
    count = round(plan.rate * plan.seconds)
    took, late = array("d", bytes(8 * count)), array("d", bytes(8 * count))
    before = memory_mb("VmRSS")
    begun = time.perf_counter()
    for index in range(count):
        due = begun + index / plan.rate
        _wait_until(due, plan.busy / plan.rate)
        request = requests(index)
        start = time.perf_counter()
        hook.offer(request)
        took[index] = time.perf_counter() - start
        late[index] = start - due
    seconds = time.perf_counter() - begun
    last_error = hook.last_error
    start = time.perf_counter()
    clean = hook.close(plan.close_s)
    return LoadResult(
        offered=count,
        seconds=round(seconds, 3),
        offer_ms=_spread(took),
        late_ms=_spread(late),
        rss_before_mb=before,
        rss_peak_mb=memory_mb("VmHWM"),
        close_s=round(time.perf_counter() - start, 3),
        closed_clean=clean,
        counters=hook.counters(),
        last_error=last_error,
    )


class Witness:
    """A sink that notes the keys of what its log acknowledged."""

    def __init__(self, sink: Sink, keys: list[bytes]) -> None:
        self._sink = sink
        self._keys = keys

    def append(self, topic: str, entries: Sequence[Any]) -> None:
        self._sink.append(topic, entries)
        self._keys.extend(entry.key for entry in entries)

    def close(self) -> None:
        self._sink.close()


def requests_of(plan: LoadPlan) -> Callable[[int], FinishedRequest]:
    """The request of an index: random ids, made once, so that making it costs the caller little."""
    chooser = random.Random(7)
    pool = [[chooser.randrange(49_152) for _ in range(plan.num_ids)] for _ in range(16)]
    cut = plan.num_ids - plan.num_ids // OUTPUT_SHARE
    pairs = [(tuple(ids[:cut]), tuple(ids[cut:])) for ids in pool]
    sampling = Sampling(max_tokens=plan.num_ids)

    def make(index: int) -> FinishedRequest:
        name = f"{plan.run}-{index}"
        prompt, output = pairs[index % len(pairs)]
        return FinishedRequest(name, name, TENANT, "s", prompt, output, "stop", sampling)

    return make


def _wait_until(due: float, busy_s: float) -> None:
    work_from = due - busy_s
    if (ahead := work_from - time.perf_counter()) > 0:
        time.sleep(ahead)
    if busy_s:
        while time.perf_counter() < due:
            sum(range(50))


def _spread(seconds: array[float]) -> Spread:
    ordered = sorted(seconds)
    return Spread(*(round(1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)], 4) for share in QUANTILES))


QUANTILES = (0.5, 0.99, 0.999, 1.0)


def memory_mb(field: str) -> float:
    """MiB of VmRSS (now) or VmHWM (the most so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0

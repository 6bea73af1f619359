"""A serving process in small: finished requests at a fixed rate into a capture hook, and what its caller sees of it.

`python -m draftloop.pipeline.stream.load --client FILE.toml --topic TOPIC` prints one JSON object. Fault tests stop the
broker meanwhile; `draftloop bench capture` runs it as it is.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from draftloop.pipeline.errors import AppendError
from draftloop.pipeline.records import Sampling
from draftloop.pipeline.stream.kafka_config import KafkaConfig, read_client
from draftloop.pipeline.stream.policy import ConsentPolicy, TenantConsent
from draftloop.serving_hooks.capture import CaptureHook, CaptureLimits, FinishedRequest
from draftloop.serving_hooks.sender import Sink

TENANT = "load"
POLICY = ConsentPolicy(version="load", tenants={TENANT: TenantConsent()})
OUTPUT_SHARE = 4  # one id in four is an output id
ASK_EVERY = 100  # offers between two looks whether to go on beyond the plan
MOST_SECONDS = 600.0
QUANTILES = (0.5, 0.99, 0.999, 1.0)


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
    own_ms: Spread  # of it, what the hook has to answer for: less the time this thread could run and got no core
    late_ms: Spread  # how far behind its time an offer began: sleep, scheduling and the interpreter's lock
    rss_before_mb: float
    rss_peak_mb: float
    close_s: float
    closed_clean: bool
    counters: dict[str, int]
    last_error: str | None


def drive(hook: CaptureHook, plan: LoadPlan, *, more: Callable[[], bool] = lambda: False) -> LoadResult:
    """Offer by the plan from this thread, and on while `more` says so, then close the hook."""
    requests = requests_of(plan)
    took, own, late = array("d"), array("d"), array("d")
    planned = round(plan.rate * plan.seconds)
    coreless = _coreless()
    before = memory_mb("VmRSS")
    begun = time.perf_counter()
    index = 0
    while index < planned or (index - planned) % ASK_EVERY or more():
        due = begun + index / plan.rate
        _wait_until(due, plan.busy / plan.rate)
        request = requests(index)
        starved = coreless()
        start = time.perf_counter()
        hook.offer(request)
        inside = time.perf_counter() - start
        took.append(inside)
        own.append(max(0.0, inside - (coreless() - starved)))
        late.append(start - due)
        index += 1
    seconds = time.perf_counter() - begun
    last_error = hook.last_error
    start = time.perf_counter()
    clean = hook.close(plan.close_s)
    return LoadResult(
        offered=index,
        seconds=round(seconds, 3),
        offer_ms=_spread(took),
        own_ms=_spread(own),
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
        try:
            self._sink.append(topic, entries)
        except AppendError as error:
            lost = {*error.refused, *error.failed}
            self._keys.extend(entry.key for index, entry in enumerate(entries) if index not in lost)
            raise
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


def run(
    client: KafkaConfig,
    topic: str,
    plan: LoadPlan,
    *,
    limits: CaptureLimits | None = None,
    keys: list[bytes] | None = None,
    more: Callable[[], bool] = lambda: False,
) -> LoadResult:
    """Drive a hook whose log is Kafka. keys: gets the key (the request id) of every record delivered."""
    keys = [] if keys is None else keys

    def open_log() -> Witness:
        from draftloop.pipeline.stream.kafka_log import KafkaLog

        return Witness(KafkaLog(client), keys)

    hook = CaptureHook(open_log, topic=topic, policy=POLICY, target="load", limits=limits)
    return drive(hook, plan, more=more)


def measure(admin_file: Path, plan: LoadPlan) -> LoadResult:
    """Run the plan into a topic of its own on the cluster that the file's principal may create topics on."""
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    client = read_client(admin_file)
    topic = f"{client.topic_prefix}bench.{os.getpid()}-{time.time_ns()}"
    log = KafkaLog(client)
    try:
        log.create_topic(topic, num_partitions=4)
    finally:
        log.close()
    return run(client, topic, plan)


def table(result: LoadResult) -> str:
    """The result for a person."""
    counters = result.counters
    dropped = {name: count for name, count in counters.items() if name.startswith("dropped.")}
    fate = f"delivered {counters['delivered']}, dropped {dropped or 'none'}"
    lines = [f"offered {result.offered} in {result.seconds:.1f} s, {fate}"]
    for name, spread in (("inside offer", result.offer_ms), ("of it the hook's own", result.own_ms)):
        p50, p99, p999, most = (1000 * value for value in (spread.p50, spread.p99, spread.p999, spread.max))
        lines.append(f"{name:<22} p50 {p50:.1f}, p99 {p99:.1f}, p99.9 {p999:.1f}, max {most:.0f} us")
    lines.append(f"memory {result.rss_before_mb:.0f} MB before, {result.rss_peak_mb:.0f} MB at most")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the plan that the arguments give, print the result."""
    parser = argparse.ArgumentParser(prog="python -m draftloop.pipeline.stream.load", description=__doc__)
    parser.add_argument("--client", type=Path, required=True, help="TOML of a client that may write")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--rate", type=float, default=LoadPlan().rate, help="offers a second")
    parser.add_argument("--seconds", type=float, default=LoadPlan().seconds)
    parser.add_argument("--ids", type=int, default=LoadPlan().num_ids, help="token ids of a request")
    parser.add_argument("--busy", type=float, default=LoadPlan().busy, help="share of the time the caller computes")
    parser.add_argument("--run", default=LoadPlan().run, help="prefix of the request ids")
    parser.add_argument("--close-s", type=float, default=LoadPlan().close_s)
    parser.add_argument("--limits", default="{}", help="capture limits as JSON")
    parser.add_argument("--keys", type=Path, help="file for the ids of what was delivered, one a line")
    parser.add_argument("--until", type=Path, help="go on beyond --seconds until this file is there")
    chosen = parser.parse_args(arguments)
    plan = LoadPlan(
        rate=chosen.rate,
        seconds=chosen.seconds,
        num_ids=chosen.ids,
        run=chosen.run,
        busy=chosen.busy,
        close_s=chosen.close_s,
    )
    keys: list[bytes] = []
    latest = time.monotonic() + MOST_SECONDS

    def more() -> bool:
        return chosen.until is not None and not chosen.until.exists() and time.monotonic() < latest

    limits = CaptureLimits.model_validate_json(chosen.limits)
    result = run(read_client(chosen.client), chosen.topic, plan, limits=limits, keys=keys, more=more)
    if chosen.keys is not None:
        chosen.keys.write_bytes(b"\n".join(keys))
    print(msgspec.json.encode(result).decode())


def _wait_until(due: float, busy_s: float) -> None:
    work_from = due - busy_s
    if (ahead := work_from - time.perf_counter()) > 0:
        time.sleep(ahead)
    if busy_s:
        while time.perf_counter() < due:
            sum(range(50))


def _coreless() -> Callable[[], float]:
    """A clock, in seconds, of how long the calling thread was ready to run and got no core; stands still if unknown."""
    try:
        file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    except OSError:
        return lambda: 0.0
    return lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9


def _spread(seconds: array[float]) -> Spread:
    ordered = sorted(seconds)
    return Spread(*(round(1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)], 4) for share in QUANTILES))


def memory_mb(field: str) -> float:
    """MiB of VmRSS (now) or VmHWM (the most so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


if __name__ == "__main__":
    main()

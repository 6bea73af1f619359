"""The capture hook: default deny, bounded, never in the way, and every request accounted for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.pipeline.errors import StorageError
from draftloop.pipeline.records import Consent, Sampling, decode, unpack_floats, unpack_ids
from draftloop.pipeline.stream.log import LogEntry, MemoryLog
from draftloop.pipeline.stream.policy import ConsentPolicy, TenantConsent
from draftloop.serving_hooks.capture import CaptureHook, CaptureLimits, FinishedRequest
from draftloop.serving_hooks.finished import pack

TOPIC = "draftloop.raw.x"
POLICY = ConsentPolicy(version="3", tenants={"acme": TenantConsent()})
QUICK = CaptureLimits(retry_first_s=0.001, retry_most_s=0.002, linger_s=0.001)


def finished(name: str = "r1", *, tenant: str = "acme", num_tokens: int = 3, **fields: Any) -> FinishedRequest:
    values: dict[str, Any] = {
        "request_id": name,
        "conversation_id": "c1",
        "tenant": tenant,
        "subject": "s1",
        "prompt_ids": (5, 6),
        "output_ids": tuple(range(num_tokens)),
        "finish_reason": "stop",
        "sampling": Sampling(max_tokens=9),
        "time_ms": 1_700_000_000_000,
    }
    return FinishedRequest(**{**values, **fields})


def field_values(request: FinishedRequest) -> dict[str, Any]:
    return {field.name: getattr(request, field.name) for field in fields(request)}


class Flaky(MemoryLog):
    """Fails the first `failures` appends; with a gate, holds every append until it opens."""

    def __init__(self, failures: int = 0, gate: threading.Event | None = None) -> None:
        super().__init__()
        self.create_topic(TOPIC, num_partitions=2)
        self.failures = failures
        self.gate = gate
        self.entered = threading.Event()

    def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(30)
        if self.failures > 0:
            self.failures -= 1
            raise StorageError("disk full")
        super().append(topic, entries)


def stored(log: MemoryLog) -> list[Any]:
    ends = log.end_offsets(TOPIC)
    return [decode(entry.value) for part, end in ends.items() for entry in log.read(TOPIC, part, 0, end)]


def hook_on(log: MemoryLog, limits: CaptureLimits = QUICK, policy: ConsentPolicy = POLICY) -> CaptureHook:
    return CaptureHook(lambda: log, topic=TOPIC, policy=policy, target="0123456789abcdef", limits=limits)


def check_sum(counters: dict[str, int]) -> None:
    dropped = sum(count for name, count in counters.items() if name.startswith("dropped."))
    assert counters["offered"] == counters["delivered"] + dropped + counters["in_queue"]


def test_an_allowed_request_arrives_whole() -> None:
    log = Flaky()
    hook = hook_on(log)
    hook.offer(finished(logprobs=(-0.5, -1.0, -2.0), accepted=(1,), drafted=(4,), slices={"language": "en"}))
    assert hook.close(5)
    (record,) = stored(log)
    assert (record.record_id, record.conversation_id, record.tenant, record.subject) == ("r1", "c1", "acme", "s1")
    assert (unpack_ids(record.prompt_ids), unpack_ids(record.output_ids)) == ([5, 6], [0, 1, 2])
    assert unpack_floats(record.logprobs) == [-0.5, -1.0, -2.0]
    assert (record.accepted, record.drafted, record.slices) == ((1,), (4,), {"language": "en"})
    assert (record.consent.purpose, record.consent.policy_version) == ("train", "3")
    assert (record.target, record.time_ms, record.finish_reason) == ("0123456789abcdef", 1_700_000_000_000, "stop")
    assert hook.counters() == {"offered": 1, "delivered": 1, "in_queue": 0, "queue_bytes": 0, "send_errors": 0}
    assert hook.last_error is None


def test_a_refused_request_leaves_a_counter_and_opens_no_log() -> None:
    opened: list[int] = []
    hook = CaptureHook(lambda: opened.append(1) or MemoryLog(), topic=TOPIC, policy=POLICY, target="t", limits=QUICK)
    hook.offer(finished(tenant="nobody"))
    assert hook.close(1)
    assert hook.counters()["dropped.policy:no_consent"] == 1
    assert opened == []
    check_sum(hook.counters())


def test_a_conversation_keeps_its_order() -> None:
    log = Flaky()
    hook = hook_on(log, CaptureLimits(batch_records=3))
    for index in range(50):
        hook.offer(finished(f"r{index}", conversation_id=f"c{index % 5}"))
    assert hook.close(5)
    names = {f"c{each}": [r.record_id for r in stored(log) if r.conversation_id == f"c{each}"] for each in range(5)}
    assert names == {f"c{each}": [f"r{index}" for index in range(each, 50, 5)] for each in range(5)}


def test_the_same_request_has_the_same_record_id_and_each_choice_its_own() -> None:
    log = Flaky()
    hook = hook_on(log)
    for choice in (0, 0, 2):
        hook.offer(finished("r", choice=choice))
    assert hook.close(5)
    assert [record.record_id for record in stored(log)] == ["r", "r", "r-2"]


def test_a_log_that_is_not_there_at_the_start_is_opened_when_it_comes() -> None:
    log = Flaky()
    attempts: list[int] = []

    def open_log() -> MemoryLog:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("no broker")
        return log

    hook = CaptureHook(open_log, topic=TOPIC, policy=POLICY, target="t", limits=QUICK)
    hook.offer(finished())
    assert hook.close(5)
    counters = hook.counters()
    assert (counters["delivered"], counters["send_errors"]) == (1, 2)
    check_sum(counters)


def test_a_full_queue_drops_the_newest_and_the_engine_never_waits() -> None:
    gate = threading.Event()
    log = Flaky(gate=gate)
    hook = hook_on(log, CaptureLimits(max_records=10, batch_records=4))
    started = time.perf_counter()
    for index in range(500):
        hook.offer(finished(f"r{index}"))
        check_sum(hook.counters())
    assert time.perf_counter() - started < 5  # the log answers not at all meanwhile
    assert hook.counters()["dropped.queue_full_records"] == 490
    gate.set()
    assert hook.close(5)
    assert sorted(record.record_id for record in stored(log)) == sorted(f"r{index}" for index in range(10))
    check_sum(hook.counters())


def test_a_record_over_the_limit_is_dropped_alone() -> None:
    log = Flaky()
    hook = hook_on(log, CaptureLimits(max_record_bytes=2000))
    hook.offer(finished("big", num_tokens=1000))
    hook.offer(finished("small"))
    hook.offer(finished("wordy", slices={"route": "x" * 3000}))  # seen only when packed
    assert hook.close(5)
    assert [record.record_id for record in stored(log)] == ["small"]
    assert hook.counters()["dropped.too_large"] == 2
    check_sum(hook.counters())


def test_nonsense_is_counted_and_never_raised() -> None:
    log = Flaky()
    hook = hook_on(log)

    class Moody(tuple[int, ...]):
        def __len__(self) -> int:
            raise RuntimeError("not now")

    hook.offer(finished(prompt_ids=Moody()))
    hook.offer(None)  # type: ignore[arg-type]
    hook.offer(finished("fine"))
    assert hook.close(5)
    assert [record.record_id for record in stored(log)] == ["fine"]
    assert (hook.counters()["dropped.unexpected"], hook.counters()["dropped.invalid"]) == (1, 1)
    check_sum(hook.counters())


INVALID: list[dict[str, Any]] = [
    {"output_ids": (-1,)},
    {"output_ids": (2**32,)},
    {"output_ids": ("word",)},
    {"output_ids": (1.0,)},
    {"output_ids": "word"},
    {"output_ids": None},
    {"output_ids": np.array([-1])},
    {"output_ids": np.array([1.0, 2.0])},
    {"output_ids": np.array([[1, 2]])},
    {"prompt_ids": 7},
    {"prompt_ids": b"\x01\x00\x00\x00"},
    {"prompt_ids": bytearray(4)},
    {"prompt_ids": memoryview(b"\x01\x00\x00\x00")},
    {"prompt_ids": (number for number in (1, 2))},
    {"logprobs": b"\x01\x00\x00\x00"},
    {"logprobs": ("x",)},
    {"logprobs": 0.5},
    {"request_id": 5},
    {"tenant": ["acme"]},
    {"conversation_id": "\ud800"},
    {"conversation_id": None},
    {"conversation_id": b"c"},
    {"subject": None},
    {"subject": 7},
    {"time_ms": 1.5},
    {"time_ms": "now"},
    {"time_ms": 2**70},
    {"finish_reason": "weird"},
    {"finish_reason": None},
    {"drafter_version": 7},
    {"sampling": None},
    {"sampling": {"temperature": "hot"}},
    {"sampling": Sampling(temperature="hot")},  # type: ignore[arg-type]
    {"sampling": Sampling(top_k=1.5)},  # type: ignore[arg-type]
    {"sampling": Sampling(seed="x")},  # type: ignore[arg-type]
    {"accepted": ("x",)},
    {"accepted": (1.5,)},
    {"drafted": 3},
    {"slices": {"a": 1}},
    {"slices": {1: "a"}},
    {"slices": {"a": None}},
    {"slices": 5},
    {"slices": None},
    {"choice": "q"},
    {"choice": 1.5},
]


@pytest.mark.parametrize("wrong", INVALID, ids=str)
def test_what_nobody_could_read_is_dropped_as_invalid(wrong: dict[str, Any]) -> None:
    log = Flaky()
    hook = hook_on(log)
    hook.offer(FinishedRequest(**{**field_values(finished("bad")), **wrong}))
    hook.offer(finished("fine"))
    assert hook.close(5)
    assert [record.record_id for record in stored(log)] == ["fine"]
    counters = hook.counters()
    assert {name: count for name, count in counters.items() if name.startswith("dropped.")} == {"dropped.invalid": 1}
    check_sum(counters)


@settings(deadline=None, max_examples=200)
@given(
    changes=st.dictionaries(
        st.sampled_from([field.name for field in fields(FinishedRequest) if field.name != "tenant"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.binary()
        | st.lists(st.none() | st.integers(-1, 2**33) | st.floats() | st.text(), max_size=3)
        | st.dictionaries(st.text() | st.integers(), st.text() | st.none(), max_size=2),
        max_size=3,
    )
)
def test_whatever_an_engine_puts_into_the_fields_what_is_packed_can_be_read(changes: dict[str, Any]) -> None:
    consent = Consent(purpose="train", policy_version="3", basis="b")
    try:
        value = pack(FinishedRequest(**{**field_values(finished()), **changes}), consent, "t")
    except (OverflowError, TypeError, ValueError):
        return
    decode(value)


def test_numpy_arrays_pack_as_the_lists_they_mean() -> None:
    log = Flaky()
    hook = hook_on(log)
    plain = {
        "prompt_ids": [1, 2, 2**32 - 1],
        "output_ids": [4, 5],
        "logprobs": [-0.5, -1.25],
        "time_ms": 7,
        "choice": 2,
    }
    hook.offer(finished(**plain))
    for integers, floats in (("<u4", "f4"), (">i8", "f8"), ("<i8", "f2")):
        arrays = {
            "prompt_ids": np.array([1, 2, 2**32 - 1], dtype=integers),
            "output_ids": np.array([0, 4, 0, 5], dtype=integers)[1::2],
            "logprobs": np.array([-0.5, -1.25], dtype=floats),
            "time_ms": np.int64(7),
            "choice": np.int32(2),
        }
        hook.offer(finished(**arrays))
    hook.offer(finished("none", logprobs=np.array([])))
    assert hook.close(5)
    first, *others, last = stored(log)
    assert others == [first] * 3
    assert unpack_ids(first.prompt_ids) == [1, 2, 2**32 - 1]
    assert last.logprobs is None


def test_a_request_of_a_thousand_ids_is_packed_and_checked_far_below_a_tenth_of_a_millisecond() -> None:
    request = finished(
        prompt_ids=list(range(600)), num_tokens=400, logprobs=[-0.5] * 400, accepted=(2,) * 130, drafted=(4,) * 130
    )
    consent = Consent(purpose="train", policy_version="3", basis="b")
    best = min(timeit.repeat(lambda: pack(request, consent, "t"), number=100, repeat=20)) / 100
    assert best < 1e-4


def test_a_new_policy_counts_from_the_next_offer_on() -> None:
    log = Flaky()
    hook = hook_on(log)
    hook.offer(finished("before"))
    hook.set_policy(ConsentPolicy(version="4"))
    hook.offer(finished("after"))
    assert hook.close(5)
    assert [record.record_id for record in stored(log)] == ["before"]


def test_the_counters_add_up_at_every_moment_under_load() -> None:
    log = Flaky(failures=5)
    hook = hook_on(log, CaptureLimits(max_records=20, batch_records=7, retry_first_s=0.001, retry_most_s=0.001))
    stop = threading.Event()
    wrong: list[dict[str, int]] = []

    def watch() -> None:
        while not stop.is_set():
            counters = hook.counters()
            dropped = sum(count for name, count in counters.items() if name.startswith("dropped."))
            if counters["offered"] != counters["delivered"] + dropped + counters["in_queue"]:
                wrong.append(counters)

    def offer(start: int) -> None:
        for index in range(200):
            hook.offer(finished(f"r{start + index}", tenant="acme" if index % 3 else "nobody"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    offering = [threading.Thread(target=offer, args=(1000 * each,)) for each in range(3)]
    for thread in offering:
        thread.start()
    for thread in offering:
        thread.join()
    hook.close(5)
    stop.set()
    watcher.join()
    assert wrong == []
    assert hook.counters()["offered"] == 600
    assert hook.counters()["delivered"] == len(stored(log))


@settings(deadline=None, max_examples=30)
@given(
    offers=st.lists(st.tuples(st.sampled_from(["acme", "nobody"]), st.integers(0, 400)), max_size=25),
    limits=st.builds(
        CaptureLimits,
        max_records=st.integers(1, 30),
        max_bytes=st.integers(600, 10_000),
        max_record_bytes=st.integers(300, 3000),
        batch_records=st.integers(1, 5),
        batch_bytes=st.integers(1, 5000),
        linger_s=st.sampled_from([0.0, 0.001]),
        retry_first_s=st.just(0.001),
    ),
    failures=st.integers(0, 6),
)
def test_whatever_is_offered_is_delivered_or_counted(
    offers: list[tuple[str, int]], limits: CaptureLimits, failures: int
) -> None:
    log = Flaky(failures=failures)
    hook = hook_on(log, limits)
    for index, (tenant, num_tokens) in enumerate(offers):
        hook.offer(finished(f"r{index}", tenant=tenant, num_tokens=num_tokens))
    hook.close(5)
    counters = hook.counters()
    check_sum(counters)
    assert counters["in_queue"] == counters["queue_bytes"] == 0
    assert counters["offered"] == len(offers)
    records = stored(log)
    assert counters["delivered"] == len(records)
    assert {record.tenant for record in records} <= {"acme"}


def test_the_hook_imports_without_torch_and_the_training_stack() -> None:
    heavy = ("torch", "transformers", "mlflow", "datasets", "deepspeed", "accelerate", "numpy")
    code = f"import sys, draftloop.serving_hooks.capture; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_full_queue_refuses_by_lengths_alone_and_packs_nothing() -> None:
    class Lengthy(tuple[int, ...]):
        def __iter__(self) -> Any:
            raise AssertionError("packed")

    log = Flaky(gate=threading.Event())
    hook = hook_on(log, CaptureLimits(max_records=1))
    hook.offer(finished("first"))
    hook.offer(finished("second", prompt_ids=Lengthy((1, 2, 3))))
    assert hook.counters()["dropped.queue_full_records"] == 1
    log.gate.set()  # type: ignore[union-attr]
    assert hook.close(5)


def test_the_byte_budget_is_exact_and_counts_what_is_in_flight_too() -> None:
    gate = threading.Event()
    log = Flaky(gate=gate)
    small = hook_on(Flaky(gate=gate))
    small.offer(finished("r0", num_tokens=1000))
    deadline = time.monotonic() + 5
    while (size := small.counters()["queue_bytes"]) > 5000:  # not packed yet
        assert time.monotonic() < deadline
    assert size > 4000
    hook = hook_on(log, CaptureLimits(max_bytes=3 * size, batch_records=2))
    for index in range(9):
        hook.offer(finished(f"r{index}", num_tokens=1000))
    counters = hook.counters()
    assert (counters["dropped.queue_full_bytes"], counters["queue_bytes"]) == (6, 3 * size)
    gate.set()
    assert hook.close(5)
    assert small.close(5)
    assert hook.counters()["queue_bytes"] == 0


def test_until_it_is_packed_a_request_counts_with_the_memory_of_its_objects() -> None:
    log = Flaky(gate=threading.Event())
    hook = hook_on(log)
    hook.offer(finished("r0", num_tokens=1000))
    assert 40_000 < hook.counters()["queue_bytes"] < 50_000
    log.gate.set()  # type: ignore[union-attr]
    assert hook.flush(5)
    assert hook.counters()["queue_bytes"] == 0
    assert hook.close(5)


def test_what_the_engine_does_to_its_lists_after_the_offer_changes_no_record() -> None:
    log = Flaky(gate=threading.Event())
    hook = hook_on(log)
    prompt, slices = [5, 6], {"language": "en"}
    hook.offer(finished(prompt_ids=prompt, slices=slices))
    prompt.clear()
    slices.clear()
    log.gate.set()  # type: ignore[union-attr]
    assert hook.close(5)
    (record,) = stored(log)
    assert (unpack_ids(record.prompt_ids), record.slices) == ([5, 6], {"language": "en"})


def test_the_constructor_opens_nothing_and_starts_nothing() -> None:
    def never() -> MemoryLog:
        raise AssertionError("opened")

    before = threading.active_count()
    CaptureHook(never, topic=TOPIC, policy=POLICY, target="t")
    assert threading.active_count() == before


def test_closing_twice_and_offering_after_it_adds_up() -> None:
    log = Flaky()
    hook = hook_on(log)
    hook.offer(finished("a"))
    assert hook.close(5)
    assert hook.close(0)
    hook.offer(finished("b"))
    counters = hook.counters()
    assert (counters["delivered"], counters["dropped.closed"]) == (1, 1)
    check_sum(counters)


def test_nothing_of_a_request_is_logged_or_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(0)
    secret = "CANARY-7f3a"

    class Talkative(Flaky):
        def append(self, topic: str, entries: Sequence[LogEntry]) -> None:
            if self.failures > 0:
                self.failures -= 1
                raise StorageError(f"cannot write {entries[0]!r}")
            super().append(topic, entries)

    log = Talkative(failures=3)
    hook = hook_on(log)
    ids = tuple(secret.encode())
    fields = {"conversation_id": secret, "subject": secret, "slices": {"route": secret}, "prompt_ids": ids}
    hook.offer(finished(secret, **fields))
    hook.offer(finished(secret, **{**fields, "output_ids": (secret,)}))
    hook.offer(finished(secret, tenant=secret))
    assert hook.close(5)
    shown = [*(record.getMessage() for record in caplog.records), *capfd.readouterr(), str(hook.counters())]
    assert not any(secret in text for text in shown)
    assert hook.counters()["delivered"] == 1

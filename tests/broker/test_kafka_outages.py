"""KafkaLog while its broker is killed, frozen and back: told in bounded time, nothing lingers, used again by itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from draftloop.pipeline.errors import BrokerUnreachableError
from draftloop.pipeline.stream.broker import LocalBroker
from draftloop.pipeline.stream.kafka_log import KafkaLog
from draftloop.pipeline.stream.log import LogEntry


def test_a_killed_broker_is_told_and_used_again_when_it_is_back(own_broker: LocalBroker, kafka_libs: Path) -> None:
    short = {"connect_timeout_s": 2.0, "request_timeout_s": 2.0, "delivery_timeout_s": 2.0}
    log = KafkaLog(own_broker.client("admin").model_copy(update=short))
    topic = "draftloop.raw.x"
    log.create_topic(topic, num_partitions=1)
    for _ in range(4):
        log.append(topic, [LogEntry(b"k", os.urandom(4000)) for _ in range(250)])
    reader = log.read(topic, 0, 0, 1000)
    next(reader)
    state = own_broker.state()
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(state.pid)], timeout=10)
    for act in (
        lambda: log.append(topic, [LogEntry(b"k", b"while it is dead")]),
        lambda: log.end_offsets(topic),
        lambda: log.commit("draftloop.curator.x", topic, {0: 1}),
        lambda: list(reader),
        lambda: log.append(topic, [LogEntry(b"k", b"still")]),
    ):
        before = time.monotonic()
        with pytest.raises(BrokerUnreachableError, match="nothing listens at"):
            act()
        assert time.monotonic() - before < 4.5
    own_broker.up(libs=kafka_libs)
    log.append(topic, [LogEntry(b"k", b"back")])
    assert [entry.value for entry in log.read(topic, 0, 999, 2000)][1:] == [b"back"]  # nothing lingered and came late
    log.commit("draftloop.curator.x", topic, {0: 1001})
    assert log.committed("draftloop.curator.x", topic) == {0: 1001}
    log.close()


def test_a_frozen_broker_is_told_in_bounded_time_and_closing_does_not_wait(own_broker: LocalBroker) -> None:
    short = {"connect_timeout_s": 1.0, "request_timeout_s": 2.0, "delivery_timeout_s": 2.0}
    log = KafkaLog(own_broker.client("admin").model_copy(update=short))
    topic = "draftloop.raw.x"
    log.create_topic(topic, num_partitions=1)
    log.append(topic, [LogEntry(b"k", b"before")])
    state = own_broker.state()
    assert state is not None
    os.kill(state.pid, signal.SIGSTOP)
    try:
        before = time.monotonic()
        with pytest.raises(BrokerUnreachableError, match="takes connections and then says nothing"):
            log.append(topic, [LogEntry(b"k", b"frozen")])
        assert (
            time.monotonic() - before < 2 + 1 + 2 + 1 + 1
        )  # delivery, grace, the thread's end, probe; and a slow machine
        with pytest.raises(BrokerUnreachableError, match="takes connections and then says nothing"):
            log.end_offsets(topic)
        before = time.monotonic()
        log.close()
        assert time.monotonic() - before < 3
    finally:
        os.kill(state.pid, signal.SIGCONT)


def test_a_short_freeze_is_ridden_out(own_broker: LocalBroker) -> None:
    log = KafkaLog(own_broker.client("admin"))
    topic = "draftloop.raw.x"
    log.create_topic(topic, num_partitions=1)
    log.append(topic, [LogEntry(b"k", b"0")])
    state = own_broker.state()
    assert state is not None
    os.kill(state.pid, signal.SIGSTOP)
    thaw = threading.Timer(1.5, os.kill, (state.pid, signal.SIGCONT))
    thaw.start()
    log.append(topic, [LogEntry(b"k", b"1")])
    thaw.join()
    assert [entry.value for entry in log.read(topic, 0, 0, 9)] == [b"0", b"1"]
    log.close()

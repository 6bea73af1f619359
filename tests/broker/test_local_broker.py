"""The local Apache Kafka: starts, keeps, recovers, stops only its own, and lets nobody in who should not be."""

from __future__ import annotations

from draftloop.pipeline.stream.broker import LocalBroker


def test_up_answers_with_where_it_listens_and_a_second_up_finds_it_running(broker: LocalBroker) -> None:
    first = broker.state()
    assert first is not None
    assert broker.up(libs=None) == first
    assert broker.status()["running"] is True

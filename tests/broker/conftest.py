"""A real Apache Kafka for every test of this folder: one for the session, and one of its own where a test breaks it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftloop.pipeline.errors import JavaNotFoundError, KafkaJarsNotFoundError
from draftloop.pipeline.stream.broker import LocalBroker, find_java, find_libs
from draftloop.pipeline.stream.kafka_config import KafkaConfig

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.broker)
            # kafka-python 3.0.12 reads its schemas that way while it is imported.
            item.add_marker(pytest.mark.filterwarnings("ignore:(open|read)_text is deprecated:DeprecationWarning"))


@pytest.fixture(scope="session")
def kafka_libs() -> Path:
    """The folder of Kafka's jars; skips with how to get them where they or Java are missing."""
    try:
        find_java(os.environ)
        return find_libs(None, os.environ)
    except (JavaNotFoundError, KafkaJarsNotFoundError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def broker(kafka_libs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """The session's broker. Tests keep to topics and users of their own names, and do not stop it."""
    started = LocalBroker(tmp_path_factory.mktemp("kafka") / "home")
    started.up(libs=kafka_libs)
    yield started
    started.down()


@pytest.fixture(scope="session")
def admin(broker: LocalBroker) -> KafkaConfig:
    """How the administrator reaches the session's broker."""
    return broker.client("admin")


@pytest.fixture
def own_broker(kafka_libs: Path, tmp_path: Path) -> Iterator[LocalBroker]:
    """A fresh broker for one test, which may kill, freeze or stop it."""
    started = LocalBroker(tmp_path / "own-kafka")
    started.up(libs=kafka_libs)
    yield started
    started.down(wait_s=5)

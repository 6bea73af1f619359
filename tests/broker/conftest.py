"""A real Apache Kafka of its own for a test that breaks it; the session's is in the conftest above."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftloop.pipeline.stream.broker import LocalBroker

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.broker)


@pytest.fixture(scope="session")
def access(broker: LocalBroker) -> LocalBroker:
    """The session's broker after `access apply` of the packaged file for the target `smollm2`."""
    from draftloop.pipeline.stream.access import apply
    from draftloop.pipeline.stream.access_site import open_site

    with open_site(broker.home, None, targets=["smollm2"]) as site:
        apply(site.spec, site.cluster, site.secrets, site.audit)
    return broker


@pytest.fixture
def own_broker(kafka_libs: Path, tmp_path: Path) -> Iterator[LocalBroker]:
    """A fresh broker for one test, which may kill, freeze or stop it."""
    started = LocalBroker(tmp_path / "own-kafka")
    started.up(libs=kafka_libs)
    yield started
    started.down(wait_s=5)

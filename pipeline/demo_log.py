"""The demo's capture log: the SQLite file, a Kafka that is configured, or one started here, one user a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from draftloop.pipeline.service import HookLog
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.workspace import Workspace


@contextmanager
def demo_log(workspace: Workspace, screen: Screen) -> Iterator[tuple[Workspace, HookLog]]:
    """The workspace the loop reads through, and where the hook in the engine writes.

    On a broker started here the hook logs in as a user that can write and not read, the loop as one that reads.
    """
    kafka = workspace.config.log.kafka
    if workspace.config.log.kind != "kafka" or kafka.bootstrap:
        yield workspace, HookLog(workspace.open_log, kafka if workspace.config.log.kind == "kafka" else None)
        return
    from draftloop.pipeline.stream.access_site import open_site
    from draftloop.pipeline.stream.broker import LocalBroker
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    screen.rule("a broker on this machine")
    broker = LocalBroker(workspace.root / "broker")
    try:
        state = broker.up(libs=None, on_wait=screen.say)
        screen.say(f"Kafka at {state.bootstrap}: TLS, SCRAM-SHA-512, nothing allowed without an ACL")
        with open_site(broker.home, None, targets=(workspace.slug(),)) as site:
            acts = site.apply().acts
            matrix = site.verify()
            matrix.check()
            screen.say(f"access: {len(acts)} changes, {len(matrix.cells)} acts tried as each principal, no surprise")
            hook, curator = site.client("draftloop-hook"), site.client("draftloop-curator")
        yield reading_as(workspace, curator), HookLog(lambda: KafkaLog(hook), hook)
    finally:
        broker.down()


def reading_as(workspace: Workspace, client: KafkaConfig) -> Workspace:
    """The same work folder with its log read as this client."""
    log = workspace.config.log.model_copy(update={"kind": "kafka", "kafka": client})
    return dataclasses.replace(workspace, config=workspace.config.model_copy(update={"log": log}))

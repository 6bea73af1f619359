"""Where capture begins in an API server, and how it ends: whatever is queued is delivered or counted."""

from __future__ import annotations

import logging

from draftloop.serving_hooks.at_exit import close_at_exit
from draftloop.serving_hooks.capture import CaptureHook
from draftloop.serving_hooks.sender import Sink
from draftloop.serving_hooks.vllm.metrics import export
from draftloop.serving_hooks.vllm.requests import end_all
from draftloop.serving_hooks.vllm.runtime import Runtime
from draftloop.serving_hooks.vllm.settings import CaptureSettings

SQLITE_PARTITIONS = 4  # as a work folder makes the topic


def start(runtime: Runtime) -> None:
    """Export the metrics and make the hook, once a process. Opens and sends nothing yet."""
    if runtime.started:
        return
    runtime.started = True
    export(runtime)
    settings, fingerprint = runtime.settings, runtime.fingerprint
    if settings is None or fingerprint is None or (settings.capture.sqlite is None and settings.capture.kafka is None):
        return
    capture = settings.capture
    runtime.hook = CaptureHook(
        lambda: open_log(capture),
        topic=capture.topic,
        policy=settings.consent,
        target=fingerprint.digest,
        limits=capture.limits,
    )
    close_at_exit(runtime.hook, capture.close_timeout_s, before=lambda: end_all(runtime), report=_report)


def _report(counters: dict[str, int]) -> None:
    """The last account, as a line among vLLM's own: only what is logged below its name is shown."""
    logging.getLogger("vllm.draftloop").info("capture ended: %s", counters)


def open_log(settings: CaptureSettings) -> Sink:
    """The log the settings name. Raises StorageError, BrokerError. The sender calls it, again and again."""
    if settings.kafka is not None:
        from draftloop.pipeline.stream.kafka_log import KafkaLog  # a client of Kafka is not part of the base install

        return KafkaLog(settings.kafka)
    from draftloop.pipeline.stream.sqlite_log import SqliteLog

    assert settings.sqlite is not None
    log = SqliteLog(settings.sqlite)
    if settings.topic not in log.topics():
        log.create_topic(settings.topic, num_partitions=SQLITE_PARTITIONS)
    return log

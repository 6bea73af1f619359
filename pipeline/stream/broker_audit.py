"""Starts and stops of a local broker on its own audit topic."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from draftloop.pipeline.stream.audit import AUDIT_TOPIC, AuditRecord, LogAudit
from draftloop.pipeline.stream.kafka_config import read_client


def note(home: Path, act: Literal["broker.start", "broker.stop"], outcome: Literal["begun", "done"]) -> bool:
    """Record an act on the running broker of `home`. False: before `access apply` there is no topic to record it on.

    Raises BrokerError, ConfigError.
    """
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    admin = read_client(home / "clients" / "admin.toml")
    log = KafkaLog(admin)
    try:
        if AUDIT_TOPIC not in log.topics():
            return False
        record = AuditRecord(
            time_ms=time.time_ns() // 1_000_000,
            act=act,
            outcome=outcome,
            by=admin.required().principal,
            subject=str(admin.cluster_id),
        )
        LogAudit(log).record(record)
        return True
    finally:
        log.close()

"""What goes wrong with topics, rights and records on a real broker: its own error, its mend, and nothing else lost.

Logins and certificates that go wrong are in test_security.py.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from samples import FINGERPRINT

from draftloop.pipeline.data.curate import CurateConfig, curate, pending_window
from draftloop.pipeline.errors import (
    AccessDeniedError,
    AppendError,
    DraftloopError,
    InputError,
    MissingTopicError,
    NewerSchemaError,
    RecordTooLargeError,
    UndecodableRecordError,
    WrongClusterError,
)
from draftloop.pipeline.records import SCHEMA_VERSION, CapturedRequest, Consent, Sampling, decode, encode, pack_ids
from draftloop.pipeline.stream.access_rules import Acl
from draftloop.pipeline.stream.kafka_admin import KafkaAdmin
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity
from draftloop.pipeline.stream.kafka_connect import probe
from draftloop.pipeline.stream.kafka_log import KafkaLog
from draftloop.pipeline.stream.log import LogEntry


@pytest.fixture
def topic() -> str:
    return f"bad.{uuid.uuid4().hex[:8]}.raw"


@pytest.fixture
def log(admin: KafkaConfig, topic: str) -> Iterator[KafkaLog]:
    opened = KafkaLog(admin.model_copy(update={"topic_prefix": topic.removesuffix("raw")}))
    opened.create_topic(topic, num_partitions=1)
    yield opened
    opened.close()


@pytest.fixture
def nobody(admin: KafkaConfig, topic: str, tmp_path: Path) -> Iterator[KafkaLog]:
    """A log whose principal may log in and nothing else, until a test grants it something."""
    file = tmp_path / "password"
    file.write_text(uuid.uuid4().hex)
    file.chmod(0o600)
    assert admin.security is not None
    security = KafkaSecurity(username=user(topic), password_file=file, ca_file=admin.security.ca_file)
    with KafkaAdmin(admin) as cluster:
        cluster.set_password(user(topic), security.password())
    config = admin.model_copy(update={"security": security})
    deadline = time.monotonic() + 10
    while True:  # a new user is known to the node a moment later
        try:
            probe(config)
            break
        except DraftloopError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    opened = KafkaLog(config)
    yield opened
    opened.close()


def user(topic: str) -> str:
    return topic.replace(".", "-")


def grant(admin: KafkaConfig, topic: str, operation: str, resource: str, name: str, pattern: str = "literal") -> None:
    with KafkaAdmin(admin) as cluster:
        cluster.create_acl(Acl(f"User:{user(topic)}", "ALLOW", operation, resource, name, pattern))
    time.sleep(1)  # the node answers by a new ACL a moment later


def record(number: int) -> bytes:
    return encode(
        CapturedRequest(
            record_id=f"r-{number}",
            time_ms=1000 + number,
            conversation_id=f"c-{number}",
            tenant="acme",
            subject="s-1",
            consent=Consent(purpose="train", policy_version="p1", basis="tenant-policy"),
            target=FINGERPRINT.digest,
            drafter_version=None,
            prompt_ids=pack_ids([number, 2, 3]),
            output_ids=pack_ids([4, 5, 6, 7]),
            finish_reason="stop",
            sampling=Sampling(),
        )
    )


def test_a_broker_of_another_cluster_is_refused_before_anything_is_asked(admin: KafkaConfig, topic: str) -> None:
    found = probe(admin).cluster_id
    pinned = admin.model_copy(update={"cluster_id": "ThisIsAnotherCluster01"})
    with pytest.raises(WrongClusterError) as told:
        probe(pinned)
    assert told.value.message == (
        f"{admin.bootstrap[0]} belongs to cluster {found}, not to ThisIsAnotherCluster01 (cluster_id)"
    )
    assert "cluster_id" in (told.value.mend or "")
    log = KafkaLog(pinned)
    for act in (log.topics, lambda: log.append(topic, [LogEntry(b"k", b"v")])):
        with pytest.raises(WrongClusterError):
            act()
    log.close()


def test_a_missing_topic_is_told_at_once_with_those_there_are(log: KafkaLog, topic: str) -> None:
    missing = f"{topic}.missing"
    before = time.monotonic()
    with pytest.raises(MissingTopicError) as told:
        log.append(missing, [LogEntry(b"k", b"v")])
    assert time.monotonic() - before < 2
    assert told.value.message == f"no topic {missing!r} in the log (it has: {topic})"
    assert told.value.mend == "create it first (Kafka: `draftloop access apply`)"
    assert told.value.reason == "missing_topic"


def test_a_topic_name_that_kafka_does_not_take_is_told(log: KafkaLog) -> None:
    for name in ("with space", "ümlaut", "a" * 250):
        with pytest.raises(InputError):
            log.create_topic(name, num_partitions=1)
        with pytest.raises(InputError):
            log.append(name, [LogEntry(b"k", b"v")])


def test_a_missing_acl_is_told_with_principal_act_and_topic(
    log: KafkaLog, nobody: KafkaLog, admin: KafkaConfig, topic: str
) -> None:
    def denied(act: str, attempt: object) -> None:
        before = time.monotonic()
        with pytest.raises(AccessDeniedError) as told:
            attempt()  # type: ignore[operator]
        assert time.monotonic() - before < 2
        assert told.value.message == f"{user(topic)} may not {act}"
        assert "`draftloop access plan`" in (told.value.mend or "")
        assert told.value.reason == "access_denied"

    log.append(topic, [LogEntry(b"k", b"v")])
    entry = [LogEntry(b"k", b"v")]
    denied(f"see topic {topic!r}", lambda: nobody.append(topic, entry))
    denied(f"see topic {topic!r}", lambda: list(nobody.read(topic, 0, 0, 1)))
    denied(f"see topic {topic!r}", lambda: nobody.create_topic(topic, num_partitions=1))
    assert nobody.topics() == {}
    grant(admin, topic, "DESCRIBE", "topic", topic)
    denied(f"append to topic {topic!r}", lambda: nobody.append(topic, entry))
    denied(f"read topic {topic!r}", lambda: list(nobody.read(topic, 0, 0, 1)))
    denied(f"commit offsets of group '{topic}.g'", lambda: nobody.commit(f"{topic}.g", topic, {0: 1}))
    denied(f"read the offsets of group '{topic}.g'", lambda: nobody.committed(f"{topic}.g", topic))
    assert nobody.end_offsets(topic) == {0: 1}
    grant(admin, topic, "WRITE", "topic", topic)
    nobody.append(topic, entry)
    assert log.end_offsets(topic) == {0: 2}


def test_a_group_outside_the_granted_prefix_is_denied(
    log: KafkaLog, nobody: KafkaLog, admin: KafkaConfig, topic: str
) -> None:
    grant(admin, topic, "READ", "topic", topic)
    grant(admin, topic, "READ", "group", f"{topic}.curator.", "prefixed")
    nobody.commit(f"{topic}.curator.run-once", topic, {0: 0})
    assert nobody.committed(f"{topic}.curator.run-once", topic) == {0: 0}
    with pytest.raises(AccessDeniedError, match=f"may not commit offsets of group '{topic}.other'"):
        nobody.commit(f"{topic}.other", topic, {0: 0})


@pytest.mark.parametrize("limit", [None, 65536], ids=["the broker's default limit", "a small limit"])
def test_a_3_mb_record_between_two_small_ones_is_refused_alone(
    admin: KafkaConfig, topic: str, log: KafkaLog, limit: int | None
) -> None:
    with KafkaAdmin(admin) as cluster:
        cluster.set_configs(topic, {"max.message.bytes": str(limit or 2**20)})
    large = os.urandom(3 * 2**20)
    for turn in range(2):
        with pytest.raises(AppendError) as told:
            log.append(topic, [LogEntry(b"a", b"%d" % turn), LogEntry(b"a", large), LogEntry(b"a", b"%d." % turn)])
        assert told.value.failed == {}
        assert list(told.value.refused) == [1]
        refusal = told.value.refused[1]
        assert type(refusal) is RecordTooLargeError
        assert (
            refusal.message
            == f"an entry of {3 * 2**20 + 1} bytes for topic {topic!r} is over the topic's max.message.bytes"
        )
        assert "max.message.bytes" in (refusal.mend or "")
        assert refusal.reason == "too_large"
    assert [entry.value for entry in log.read(topic, 0, 0, 9)] == [b"0", b"0.", b"1", b"1."]


def test_a_3_mb_record_is_taken_where_the_topic_takes_it(log: KafkaLog, topic: str, admin: KafkaConfig) -> None:
    with KafkaAdmin(admin) as cluster:
        cluster.set_configs(topic, {"max.message.bytes": str(4 * 2**20)})
    sent = [b"small", os.urandom(3 * 2**20), b"small too"]
    log.append(topic, [LogEntry(b"a", value) for value in sent])
    assert [entry.value for entry in log.read(topic, 0, 0, 9)] == sent


def test_undecodable_bytes_and_a_newer_schema_are_rejected_by_reason_and_the_rest_is_kept(
    log: KafkaLog, topic: str, tmp_path: Path
) -> None:
    newer = msgspec.msgpack.encode({**msgspec.msgpack.decode(record(1)), "schema": SCHEMA_VERSION + 1})
    junk = b"\xc1\xff not a record"
    with pytest.raises(NewerSchemaError, match="schema 2") as told_newer:
        decode(newer)
    with pytest.raises(UndecodableRecordError) as told_junk:
        decode(junk)
    assert told_newer.value.mend
    assert told_junk.value.mend
    log.append(topic, [LogEntry(b"k", value) for value in (record(1), junk, record(2), newer, record(3))])
    window = pending_window(log, topic, f"{topic}.curator")
    with curate(log, window, beside=tmp_path, fingerprint=FINGERPRINT, config=CurateConfig()) as curated:
        assert curated.counts["captured"] == 5
        assert curated.counts["kept"] == 3
        assert curated.counts["rejected"] == {"undecodable": 1, "newer_schema": 1}
        assert [(reject.offset, reject.reason) for reject in curated.rejects()] == [
            (1, "undecodable"),
            (3, "newer_schema"),
        ]

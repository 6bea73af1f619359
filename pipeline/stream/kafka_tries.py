"""The tries of `access verify`: one act of one principal on a real broker, and what the broker made of it.

Each is a raw request that Kafka authorizes first and can then only refuse or ignore: none writes a record, moves an
offset, makes a topic or gives content away, whatever the topics' settings are. Any broker can be asked: rights are
checked before leadership.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kafka import errors as kafka_errors
from kafka.admin import ConfigResourceType, KafkaAdminClient
from kafka.protocol.admin import (
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteAclsRequest,
    DeleteRecordsRequest,
    DescribeAclsRequest,
    DescribeConfigsRequest,
    DescribeGroupsRequest,
    IncrementalAlterConfigsRequest,
)
from kafka.protocol.consumer import FetchRequest, OffsetCommitRequest, OffsetDeleteRequest
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import ProduceRequest
from kafka.record.memory_records import MemoryRecordsBuilder

from draftloop.pipeline.stream.access_rules import Probe
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.kafka_connect import client_options, probe, translate

_Send = Callable[[Any], Any]
_Try = Callable[[_Send, str], int]  # gives Kafka's error code

_NOBODY = "User:access-verify-nobody"  # whose ACLs are asked for and taken away: it has none
_NO_TOPIC = "access-verify.no-such-topic"
_NO_SUCH_ACKS = 2
_BEYOND = 2**62  # an offset no partition reaches
_TEN_YEARS_MS = 315_360_000_000
_DELETE = 1  # the operation of IncrementalAlterConfigs that takes a setting back
_ANY = 1


class KafkaProber:
    """Implements `access.Prober` over one connection of one principal. A context manager."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._client: Any = None

    def __enter__(self) -> KafkaProber:
        """Log in. Raises BrokerError and its children, each failure told apart."""
        probe(self._config)
        try:
            self._client = KafkaAdminClient(**client_options(self._config))
        except kafka_errors.KafkaError as error:
            raise translate(error, self._config, act="log in to", resource="the cluster") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def observe(self, act: Probe) -> str:
        """ "allowed", "denied" or "error: CLASS"."""
        attempt, passed = _TRIES[act.resource, act.operation]
        try:
            code = attempt(self._send, act.name)
        except kafka_errors.KafkaError as error:
            return f"error: {type(error).__name__}"
        if code in passed or code == 0:
            return "allowed"
        if code in _DENIED:
            return "denied"
        return f"error: {kafka_errors.for_code(code).__name__}"

    def _send(self, request: Any) -> Any:
        return self._client._manager.run(self._client._manager.send, request)


def _write(send: _Send, topic: str) -> int:
    """A produce with two acknowledgements: authorized, then refused, because Kafka knows only 0, 1 and all."""
    builder = MemoryRecordsBuilder(magic=2, compression_type=0, batch_size=1024)
    builder.append(timestamp=int(time.time() * 1000) + _TEN_YEARS_MS, key=b"access-verify", value=b"")
    builder.close()
    data = ProduceRequest.TopicProduceData(
        name=topic,
        partition_data=[ProduceRequest.TopicProduceData.PartitionProduceData(index=0, records=builder.buffer())],
    )
    answer = send(
        ProduceRequest(transactional_id=None, acks=_NO_SUCH_ACKS, timeout_ms=5_000, topic_data=[data], max_version=12)
    )
    return int(answer.responses[0].partition_responses[0].error_code)


def _read(send: _Send, topic: str) -> int:
    """A fetch beyond the end: authorized, then out of range, so that no content is handed out."""
    part = FetchRequest.FetchTopic.FetchPartition(partition=0, fetch_offset=_BEYOND, partition_max_bytes=1)
    answer = send(
        FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=1,
            topics=[FetchRequest.FetchTopic(topic=topic, partitions=[part])],
            max_version=12,
        )
    )
    return int(answer.error_code or answer.responses[0].partitions[0].error_code)


def _create(send: _Send, topic: str) -> int:
    """The topic itself, only to be validated: with the right "exists already", without it refused before that."""
    wanted = CreateTopicsRequest.CreatableTopic(name=topic, num_partitions=1, replication_factor=-1)
    answer = send(CreateTopicsRequest(topics=[wanted], timeout_ms=5_000, validate_only=True))
    return int(answer.topics[0].error_code)


def _delete(send: _Send, topic: str) -> int:
    """Records before the first one: none. DELETE is the right for that and for deleting the topic."""
    answer = send(DeleteRecordsRequest(topics=[(topic, [(0, 0)])], timeout_ms=5_000))
    return int(answer.topics[0].partitions[0].error_code)


def _alter(send: _Send, topic: str) -> int:
    """One partition, only to be validated: with the right "has at least as many", which no topic lacks."""
    wanted = CreatePartitionsRequest.CreatePartitionsTopic(name=topic, count=1, assignments=None)
    answer = send(CreatePartitionsRequest(topics=[wanted], timeout_ms=5_000, validate_only=True))
    return int(answer.results[0].error_code)


def _describe(send: _Send, topic: str) -> int:
    wanted = MetadataRequest.MetadataRequestTopic(name=topic)
    return int(send(MetadataRequest(topics=[wanted], allow_auto_topic_creation=False)).topics[0].error_code)


def _describe_configs(kind: ConfigResourceType, name: str | None = None) -> _Try:
    def attempt(send: _Send, resource: str) -> int:
        wanted = (kind, resource if name is None else name, ["retention.ms"])
        return int(send(DescribeConfigsRequest(resources=[wanted], min_version=1)).results[0].error_code)

    return attempt


def _alter_configs(kind: ConfigResourceType, key: str, name: str | None = None) -> _Try:
    def attempt(send: _Send, resource: str) -> int:
        wanted = (kind, resource if name is None else name, [(key, _DELETE, None)])
        return int(send(IncrementalAlterConfigsRequest(resources=[wanted], validate_only=True)).responses[0].error_code)

    return attempt


def _commit(send: _Send, group: str) -> int:
    """A commit as a member the group does not have: authorized, then refused."""
    part = OffsetCommitRequest.OffsetCommitRequestTopic.OffsetCommitRequestPartition(
        partition_index=0, committed_offset=0, committed_metadata=""
    )
    answer = send(
        OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=1,
            member_id="access-verify",
            topics=[OffsetCommitRequest.OffsetCommitRequestTopic(name=_NO_TOPIC, partitions=[part])],
            max_version=9,
        )
    )
    return int(answer.topics[0].partitions[0].error_code)


def _describe_group(send: _Send, group: str) -> int:
    return int(send(DescribeGroupsRequest(groups=[group])).groups[0].error_code)


def _delete_offsets(send: _Send, group: str) -> int:
    """Offsets of a topic that does not exist. DELETE is the right for that and for deleting the group."""
    return int(send(OffsetDeleteRequest(group_id=group, topics=[(_NO_TOPIC, [(0,)])])).error_code)


def _alter_acls(send: _Send, _: str) -> int:
    """Take away the ACLs of a principal that has none."""
    wanted = DeleteAclsRequest.DeleteAclsFilter(**_nobodys_acls())
    return int(send(DeleteAclsRequest(filters=[wanted])).filter_results[0].error_code)


def _describe_acls(send: _Send, _: str) -> int:
    return int(send(DescribeAclsRequest(**_nobodys_acls())).error_code)


def _nobodys_acls() -> dict[str, Any]:
    return {
        "resource_type_filter": _ANY,
        "resource_name_filter": None,
        "pattern_type_filter": _ANY,
        "principal_filter": _NOBODY,
        "host_filter": None,
        "operation": _ANY,
        "permission_type": _ANY,
    }


def _codes(*errors: type[Any]) -> frozenset[int]:
    return frozenset(error.errno for error in errors)


_DENIED = _codes(
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
)
_ELSEWHERE = (kafka_errors.NotLeaderForPartitionError,)  # told only to those who may
_COORDINATOR = (
    kafka_errors.CoordinatorLoadInProgressError,
    kafka_errors.CoordinatorNotAvailableError,
    kafka_errors.NotCoordinatorError,
    kafka_errors.GroupIdNotFoundError,
)
_SETTING = (kafka_errors.InvalidConfigurationError, kafka_errors.PolicyViolationError, kafka_errors.InvalidRequestError)
_TOPIC, _BROKER = ConfigResourceType.TOPIC, ConfigResourceType.BROKER

# The act, and the refusals that Kafka gives only after it found the right to be there.
_TRIES: dict[tuple[str, str], tuple[_Try, frozenset[int]]] = {
    ("topic", "WRITE"): (
        _write,
        _codes(kafka_errors.InvalidRequiredAcksError, kafka_errors.InvalidTimestampError, *_ELSEWHERE),
    ),
    ("topic", "READ"): (_read, _codes(kafka_errors.OffsetOutOfRangeError, *_ELSEWHERE)),
    ("topic", "CREATE"): (_create, _codes(kafka_errors.TopicAlreadyExistsError)),
    ("topic", "DELETE"): (
        _delete,
        _codes(kafka_errors.PolicyViolationError, kafka_errors.OffsetOutOfRangeError, *_ELSEWHERE),
    ),
    ("topic", "ALTER"): (
        _alter,
        _codes(kafka_errors.InvalidPartitionsError, kafka_errors.ReassignmentInProgressError),
    ),
    ("topic", "DESCRIBE"): (_describe, _codes(kafka_errors.LeaderNotAvailableError)),
    ("topic", "DESCRIBE_CONFIGS"): (_describe_configs(_TOPIC), frozenset()),
    ("topic", "ALTER_CONFIGS"): (_alter_configs(_TOPIC, "retention.ms"), _codes(*_SETTING)),
    ("group", "READ"): (
        _commit,
        _codes(
            kafka_errors.UnknownMemberIdError,
            kafka_errors.IllegalGenerationError,
            kafka_errors.StaleMemberEpochError,
            kafka_errors.UnknownTopicOrPartitionError,
            kafka_errors.TopicAuthorizationFailedError,  # asked for after the right on the group
            *_COORDINATOR,
        ),
    ),
    ("group", "DESCRIBE"): (_describe_group, _codes(*_COORDINATOR)),
    ("group", "DELETE"): (_delete_offsets, _codes(kafka_errors.NonEmptyGroupError, *_COORDINATOR)),
    ("cluster", "ALTER"): (_alter_acls, frozenset()),
    ("cluster", "CREATE"): (lambda send, _: _create(send, _NO_TOPIC), frozenset()),
    ("cluster", "DESCRIBE"): (_describe_acls, frozenset()),
    ("cluster", "DESCRIBE_CONFIGS"): (_describe_configs(_BROKER, ""), frozenset()),
    ("cluster", "ALTER_CONFIGS"): (_alter_configs(_BROKER, "log.retention.ms", ""), _codes(*_SETTING)),
}

"""A Kafka cluster's access side as an administrator sees and changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from kafka import errors as kafka_errors
from kafka.admin import (
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ConfigResource,
    ConfigResourceType,
    KafkaAdminClient,
    ResourceType,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from kafka.protocol.admin import (
    AlterClientQuotasRequest,
    CreateAclsRequest,
    DeleteAclsRequest,
    DescribeAclsRequest,
    DescribeClientQuotasRequest,
    IncrementalAlterConfigsRequest,
)

from draftloop.pipeline.stream.access_plan import ClusterState
from draftloop.pipeline.stream.access_rules import Acl
from draftloop.pipeline.stream.access_spec import TopicState
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.kafka_connect import Cluster, client_options, probe, translate

SCRAM_ITERATIONS = 8192
_SET, _DELETE = 0, 1  # operations of IncrementalAlterConfigs
_UNKNOWN = "UNKNOWN_"  # begins a word of ours for a number the client library has no word for
_ANY, _ANY_NAME = 1, 2  # filters: of ACLs; of quota entities


class KafkaAdmin:
    """Implements `access.Cluster`. Connects on first use; a context manager."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._client: Any = None
        self._known: Cluster | None = None

    def __enter__(self) -> KafkaAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def principal(self) -> str:
        return self._config.required().principal

    def cluster_id(self) -> str:
        return self._cluster().cluster_id

    def state(self, topic_prefix: str) -> ClusterState:
        with self._telling("look at", "the cluster") as client:
            # First: Kafka 4.3 leaves the question for all users unanswered where DESCRIBE on the cluster is missing.
            acls = frozenset(self._acls())
            described = [t for t in client.describe_topics() if t["name"].startswith(topic_prefix)]
            configs = self._configs(client, [topic["name"] for topic in described])
            users = client.describe_user_scram_credentials()
            return ClusterState(
                topics={
                    topic["name"]: TopicState(
                        len(topic["partitions"]),
                        max((len(part["replica_nodes"]) for part in topic["partitions"]), default=0),
                        configs.get(topic["name"], {}),
                    )
                    for topic in described
                },
                users={
                    name: frozenset(found["mechanism"].name.replace("_", "-") for found in user["credential_infos"])
                    for name, user in users.items()
                },
                acls=acls,
                quotas=self._quotas(),
            )

    def create_topic(self, name: str, topic: TopicState) -> None:
        settings = {
            "num_partitions": topic.partitions,
            "replication_factor": topic.replication,
            "configs": dict(topic.configs),
        }
        with self._telling("create", f"topic {name!r}") as client:
            answer = client.create_topics({name: settings}, timeout_ms=self._timeout_ms, raise_errors=False)
            _check(answer["topics"][0]["error_code"], answer["topics"][0].get("error_message"))
            client.wait_for_topics([name], timeout_ms=self._timeout_ms)

    def grow_topic(self, name: str, partitions: int) -> None:
        with self._telling("add partitions to", f"topic {name!r}") as client:
            answer = client.create_partitions({name: partitions}, timeout_ms=self._timeout_ms, raise_errors=False)
            _check(answer.results[0].error_code, answer.results[0].error_message)

    def set_configs(self, topic: str, configs: Mapping[str, str | None]) -> None:
        with self._telling("change the settings of", f"topic {topic!r}"):
            changes = [(key, _DELETE if value is None else _SET, value) for key, value in configs.items()]
            answer = self._send(IncrementalAlterConfigsRequest(resources=[(ConfigResourceType.TOPIC, topic, changes)]))
            _check(answer.responses[0].error_code, answer.responses[0].error_message)

    def set_password(self, user: str, password: str) -> None:
        with self._telling("give a password to", f"user {user!r}") as client:
            wanted = UserScramCredentialUpsertion(user, "SCRAM-SHA-512", password, iterations=SCRAM_ITERATIONS)
            if (refusal := client.alter_user_scram_credentials([wanted]).get(user)) is not None:
                raise _RefusedError(kafka_errors.UnacceptableCredentialError.errno, refusal)

    def remove_login(self, user: str, mechanism: str) -> None:
        with self._telling("remove the login of", f"user {user!r}") as client:
            unwanted = UserScramCredentialDeletion(user, mechanism)
            if (refusal := client.alter_user_scram_credentials([unwanted]).get(user)) is not None:
                raise _RefusedError(kafka_errors.UnacceptableCredentialError.errno, refusal)

    def create_acl(self, acl: Acl) -> None:
        with self._telling("add", f"the ACL {acl.text()}"):
            creation = CreateAclsRequest.AclCreation(
                resource_type=_number(ResourceType, acl.resource),
                resource_name=acl.name,
                resource_pattern_type=_number(ACLResourcePatternType, acl.pattern),
                principal=acl.principal,
                host=acl.host,
                operation=_number(ACLOperation, acl.operation),
                permission_type=_number(ACLPermissionType, acl.permission),
            )
            answer = self._send(CreateAclsRequest(creations=[creation])).results[0]
            _check(answer.error_code, answer.error_message)

    def delete_acl(self, acl: Acl) -> None:
        with self._telling("remove", f"the ACL {acl.text()}"):
            answer = self._send(DeleteAclsRequest(filters=[_acl_filter(acl)])).filter_results[0]
            _check(answer.error_code, answer.error_message)

    def set_quota(self, user: str, values: Mapping[str, float | None]) -> None:
        with self._telling("set quotas of", f"user {user!r}"):
            changes = [(key, value or 0.0, value is None) for key, value in values.items()]
            answer = self._send(AlterClientQuotasRequest(entries=[([("user", user)], changes)], validate_only=False))
            _check(answer.entries[0].error_code, answer.entries[0].error_message)

    def _acls(self) -> Iterator[Acl]:
        answer = self._send(
            DescribeAclsRequest(
                resource_type_filter=_ANY,
                resource_name_filter=None,
                pattern_type_filter=_ANY,
                principal_filter=None,
                host_filter=None,
                operation=_ANY,
                permission_type=_ANY,
            )
        )
        _check(answer.error_code, answer.error_message)
        for found in answer.resources:
            for acl in found.acls:
                yield Acl(
                    acl.principal,
                    _word(ACLPermissionType, acl.permission_type),
                    _word(ACLOperation, acl.operation),
                    _word(ResourceType, found.resource_type).lower(),
                    found.resource_name,
                    _word(ACLResourcePatternType, found.pattern_type).lower(),
                    acl.host,
                )

    def _quotas(self) -> dict[str, dict[str, float]]:
        answer = self._send(DescribeClientQuotasRequest(components=[("user", _ANY_NAME, None)], strict=True))
        _check(answer.error_code, answer.error_message)
        return {
            entry.entity[0].entity_name: {each.key: each.value for each in entry.values}
            for entry in answer.entries or []
            if entry.entity[0].entity_name is not None  # the default of all users who have none of their own
        }

    @staticmethod
    def _configs(client: Any, topics: list[str]) -> dict[str, dict[str, str]]:
        """The settings made on each topic itself, without defaults."""
        if not topics:
            return {}
        wanted = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
        found = client.describe_configs(wanted)["topic"]
        return {
            topic: {
                key: value["value"]
                for key, value in settings.items()
                if value["config_source"] == "DYNAMIC_TOPIC_CONFIG"
            }
            for topic, settings in found.items()
        }

    @property
    def _timeout_ms(self) -> int:
        return int(self._config.request_timeout_s * 1000)

    def _cluster(self) -> Cluster:
        if self._known is None:
            self._known = probe(self._config)
        return self._known

    def _send(self, request: Any) -> Any:
        return self._client._manager.run(self._client._manager.send, request)

    @contextmanager
    def _telling(self, act: str, resource: str) -> Iterator[Any]:
        """The client; what it raises becomes one of our errors."""
        self._cluster()
        try:
            if self._client is None:
                self._client = KafkaAdminClient(**client_options(self._config))
            yield self._client
        except kafka_errors.KafkaError as error:
            raise translate(error, self._config, act=act, resource=resource) from error
        except _RefusedError as refusal:
            told = translate(kafka_errors.for_code(refusal.code)(), self._config, act=act, resource=resource)
            told.message += f": {refusal.reason}" if refusal.reason else ""
            raise told from refusal


class _RefusedError(Exception):
    """The broker's own answer about one request: unlike the library's messages it quotes no request."""

    def __init__(self, code: int, reason: str | None) -> None:
        super().__init__(code)
        self.code = code
        self.reason = reason


def _acl_filter(acl: Acl) -> Any:
    return DeleteAclsRequest.DeleteAclsFilter(
        resource_type_filter=_number(ResourceType, acl.resource),
        resource_name_filter=acl.name,
        pattern_type_filter=_number(ACLResourcePatternType, acl.pattern),
        principal_filter=acl.principal,
        host_filter=acl.host,
        operation=_number(ACLOperation, acl.operation),
        permission_type=_number(ACLPermissionType, acl.permission),
    )


def _word(kind: type[IntEnum], number: int) -> str:
    """Kafka's word for a number; newer brokers know more of them than the client library."""
    try:
        return kind(number).name
    except ValueError:
        return f"{_UNKNOWN}{number}"


def _number(kind: type[IntEnum], word: str) -> int:
    word = word.upper()
    return int(word.removeprefix(_UNKNOWN)) if word.startswith(_UNKNOWN) else kind[word].value


def _check(code: int, reason: str | None) -> None:
    if code:
        raise _RefusedError(code, reason)

"""The in-memory twin of a cluster's access side: same protocol, gone with the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from draftloop.pipeline.errors import AuthenticationError, InputError
from draftloop.pipeline.stream.access_plan import SCRAM, ClusterState
from draftloop.pipeline.stream.access_rules import Acl, Probe, allows
from draftloop.pipeline.stream.access_spec import TopicState
from draftloop.pipeline.stream.kafka_config import KafkaConfig


class MemoryCluster:
    """Topics, users, ACLs and quotas in dicts; its principals log in with their passwords."""

    principal = "admin"

    def __init__(self) -> None:
        self.topics: dict[str, TopicState] = {}
        self.passwords: dict[str, str] = {}
        self.acls: set[Acl] = set()
        self.quotas: dict[str, dict[str, float]] = {}

    def cluster_id(self) -> str:
        return "memory"

    def state(self, topic_prefix: str) -> ClusterState:
        return ClusterState(
            {name: topic for name, topic in self.topics.items() if name.startswith(topic_prefix)},
            {user: frozenset({SCRAM}) for user in self.passwords},
            frozenset(self.acls),
            {user: dict(values) for user, values in self.quotas.items() if values},
        )

    def create_topic(self, name: str, topic: TopicState) -> None:
        if name in self.topics:
            raise InputError(f"topic {name} exists")
        self.topics[name] = topic

    def grow_topic(self, name: str, partitions: int) -> None:
        if partitions <= self.topics[name].partitions:
            raise InputError(f"topic {name} has {self.topics[name].partitions} partitions, it cannot get {partitions}")
        self.topics[name] = self.topics[name]._replace(partitions=partitions)

    def set_configs(self, topic: str, configs: Mapping[str, str | None]) -> None:
        merged = {**self.topics[topic].configs, **configs}
        kept = {key: value for key, value in merged.items() if value is not None}
        self.topics[topic] = self.topics[topic]._replace(configs=kept)

    def set_password(self, user: str, password: str) -> None:
        self.passwords[user] = password

    def remove_login(self, user: str, mechanism: str) -> None:
        if mechanism != SCRAM or user not in self.passwords:
            raise InputError(f"user {user} has no {mechanism} login")
        del self.passwords[user]

    def create_acl(self, acl: Acl) -> None:
        self.acls.add(acl)

    def delete_acl(self, acl: Acl) -> None:
        self.acls.discard(acl)

    def set_quota(self, user: str, values: Mapping[str, float | None]) -> None:
        merged = {**self.quotas.get(user, {}), **values}
        self.quotas[user] = {key: value for key, value in merged.items() if value is not None}

    @contextmanager
    def connect(self, config: KafkaConfig) -> Iterator[MemoryProber]:
        """Log in as Kafka would. Raises AuthenticationError."""
        security = config.required()
        if self.passwords.get(security.username or "") != security.password():
            raise AuthenticationError(f"the cluster refuses {security.principal}", mend="check its password")
        yield MemoryProber(self, security.username or "")


class MemoryProber:
    """A principal's acts, judged by the twin's ACLs."""

    def __init__(self, cluster: MemoryCluster, principal: str) -> None:
        self._cluster = cluster
        self._principal = principal

    def observe(self, probe: Probe) -> str:
        """ "allowed", "denied" or "error: CLASS"."""
        if not allows(self._cluster.acls, self._principal, *probe):
            return "denied"
        missing = probe.resource == "topic" and probe.name not in self._cluster.topics
        return "error: UnknownTopicOrPartitionError" if missing and probe.operation != "CREATE" else "allowed"

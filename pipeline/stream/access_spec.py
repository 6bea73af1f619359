"""The access file: topics, principals, ACLs and quotas of a deployment as one TOML. Pure; unknown keys are errors."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from draftloop.pipeline.errors import ConfigError
from draftloop.pipeline.stream.access_errors import MendableError, explain
from draftloop.pipeline.stream.access_rules import (
    CLUSTER_NAME,
    CLUSTER_OPERATIONS,
    GROUP_OPERATIONS,
    TOPIC_OPERATIONS,
    Acl,
    Probe,
)
from draftloop.pipeline.stream.topics import slug

DEFAULT_FILE = Path(__file__).with_name("access.toml")
FOREIGN_GROUP = "access-verify.foreign"  # a consumer group nobody here owns
PROBE_GROUP = "access-verify"  # tried under each group prefix
HOUR_MS = 3_600_000
WEEK_MS = 7 * 24 * HOUR_MS

_TARGET = "{target}"
_PREFIX = re.compile(r"([A-Za-z0-9_-]+\.)+")
_TOPIC = re.compile(r"[A-Za-z0-9._-]+")
_PRINCIPAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_UNITS = {"s": 1_000, "m": 60_000, "h": HOUR_MS, "d": 24 * HOUR_MS}
_MANAGED = {  # settings with a key of their own in the access file
    "cleanup.policy",
    "retention.ms",
    "segment.ms",
    "max.message.bytes",
    "min.insync.replicas",
    "message.timestamp.type",
    "message.timestamp.after.max.ms",
}


def _milliseconds(value: object) -> object:
    """ "72h", "14d", "90m", "30s" or "forever" as milliseconds; -1 is Kafka's forever."""
    if value == "forever":
        return -1
    if not isinstance(value, str) or not (match := re.fullmatch(r"([1-9][0-9]*)([smhd])", value)):
        raise ValueError('a duration is a number and s, m, h or d, as in "72h", or "forever"')
    return int(match[1]) * _UNITS[match[2]]


Duration = Annotated[int, BeforeValidator(_milliseconds)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TopicSpec(_Section):
    """A topic, or with {target} in its name one topic for each target."""

    name: str
    partitions: int = Field(ge=1, le=10_000)
    replication: int | None = Field(default=None, ge=1)  # None: as for all
    min_insync_replicas: int | None = Field(default=None, ge=1)
    cleanup: Literal["delete", "compact"] = "delete"
    retention: Duration | None = None
    # Retention is by whole segments: a record may outlive its retention by the length of one.
    segment: Duration | None = None
    max_message_bytes: int = Field(default=1_048_588, ge=1024)
    max_ahead: Duration = HOUR_MS  # a timestamp further ahead is refused: it would outlive its retention
    configs: dict[str, str] = {}  # further settings of Kafka's

    @model_validator(mode="after")
    def _sound(self) -> TopicSpec:
        if taken := sorted(_MANAGED & set(self.configs)):
            raise ValueError(f"{taken[0]} has a key of its own here, it cannot stand in configs")
        if (self.retention is None) == (self.cleanup == "delete"):
            raise ValueError(f"topic {self.name!r}: cleanup delete needs retention, cleanup compact has none")
        if self.max_ahead < 0 or self.segment == -1:
            raise ValueError(f"topic {self.name!r}: max_ahead and segment cannot be forever")
        segments = self.name.replace(_TARGET, "x")
        if not _TOPIC.fullmatch(segments) or len(segments) > 200:
            raise ValueError(f"topic {self.name!r}: letters, digits, '.', '_', '-' and one whole part {_TARGET} only")
        parts = self.name.split(".")
        if not all(parts) or any(_TARGET in part and part != _TARGET for part in parts) or parts.count(_TARGET) > 1:
            raise ValueError(
                f"topic {self.name!r}: {_TARGET} must be one whole part between dots,"
                " otherwise the name of one target's topic begins another's"
            )
        return self

    def settings(self, min_insync: int) -> dict[str, str]:
        """Every setting of Kafka's that we pin, as Kafka spells it."""
        values = {
            "cleanup.policy": self.cleanup,
            "max.message.bytes": str(self.max_message_bytes),
            "min.insync.replicas": str(self.min_insync_replicas or min_insync),
            "message.timestamp.type": "CreateTime",
            "message.timestamp.after.max.ms": str(self.max_ahead),
        }
        if self.retention is not None:
            values["retention.ms"] = str(self.retention)
        segment = self.segment
        if segment is None and self.retention is not None and self.retention > 0:
            segment = min(WEEK_MS, max(HOUR_MS, self.retention // 12))
        if segment is not None:
            values["segment.ms"] = str(segment)
        return values | self.configs


class Grant(_Section):
    """Operations allowed on one resource: literal, or everything under a prefix."""

    allow: tuple[str, ...] = Field(min_length=1)
    topic: str | None = None
    topic_prefix: str | None = None
    group: str | None = None
    group_prefix: str | None = None
    cluster: bool = False

    @model_validator(mode="after")
    def _sound(self) -> Grant:
        named = [key for key in ("topic", "topic_prefix", "group", "group_prefix") if getattr(self, key) is not None]
        if len(named) + self.cluster != 1:
            raise ValueError("an ACL names exactly one of topic, topic_prefix, group, group_prefix and cluster = true")
        known = {"topic": TOPIC_OPERATIONS, "group": GROUP_OPERATIONS, "cluster": CLUSTER_OPERATIONS}[self.resource]
        for operation in self.allow:
            if operation not in known:
                raise ValueError(f"{operation!r} is no operation on a {self.resource}; there are: {', '.join(known)}")
        if not self.cluster and "*" in self.name:
            raise ValueError(f"{self.resource} {self.name!r}: no wildcards, name it or give its prefix")
        if self.pattern == "prefixed" and not _PREFIX.fullmatch(self.name.replace(_TARGET, "x")):
            raise ValueError(
                f"prefix {self.name!r} must end with '.': {self.name!r} also begins the names of other {self.resource}s"
            )
        if self.group is not None and not _TOPIC.fullmatch(self.group):
            raise ValueError(f"group {self.group!r}: letters, digits, '.', '_' and '-' only")
        return self

    @property
    def resource(self) -> Literal["topic", "group", "cluster"]:
        if self.cluster:
            return "cluster"
        return "group" if self.topic is None and self.topic_prefix is None else "topic"

    @property
    def pattern(self) -> Literal["literal", "prefixed"]:
        return "literal" if self.topic_prefix is None and self.group_prefix is None else "prefixed"

    @property
    def name(self) -> str:
        return self.topic or self.topic_prefix or self.group or self.group_prefix or CLUSTER_NAME


class Quota(_Section):
    """Bytes a second and broker; more is slowed down, not refused."""

    producer_byte_rate: int | None = Field(default=None, ge=1)
    consumer_byte_rate: int | None = Field(default=None, ge=1)

    def values(self) -> dict[str, float]:
        return {key: float(value) for key, value in self.model_dump(exclude_none=True).items()}


class PrincipalSpec(_Section):
    """Who may do what, and how it logs in."""

    name: str
    auth: Literal["scram", "mtls", "oauth"] = "scram"
    acls: tuple[Grant, ...] = ()
    quota: Quota = Quota()
    token_command: tuple[str, ...] = ()  # oauth: prints a token

    @model_validator(mode="after")
    def _sound(self) -> PrincipalSpec:
        if not _PRINCIPAL.fullmatch(self.name) or len(self.name) > 120:
            raise ValueError(f"principal {self.name!r}: letters, digits, '.', '_' and '-' only (no ',', '=' or '*')")
        if (self.auth == "oauth") != bool(self.token_command):
            raise ValueError(f"principal {self.name!r}: auth oauth and token_command go together")
        return self


class SecretsSpec(_Section):
    """Where generated passwords go: a folder of 0600 files (default HOME/secrets), or a command that takes each one."""

    folder: Path | None = None
    command: tuple[str, ...] = ()  # "{principal}" in it is replaced; the password comes on its stdin

    @model_validator(mode="after")
    def _one(self) -> SecretsSpec:
        if self.folder is not None and self.command:
            raise ValueError("secrets go to a folder or to a command, not to both")
        if self.command and not any("{principal}" in word for word in self.command):
            raise ValueError("secrets.command must hold {principal}: every password would go to the same place")
        return self


class TopicState(NamedTuple):
    """A topic as it is, or as it should be. `configs` are the settings that were made, not the defaults."""

    partitions: int
    replication: int
    configs: Mapping[str, str]


class AccessSpec(_Section):
    """The access file."""

    targets: tuple[str, ...] = Field(min_length=1)
    topic_prefix: str = "draftloop."  # topics under it are ours: what is there and not here is told
    principal_prefix: str = "draftloop-"  # likewise users
    admins: tuple[str, ...] = ("admin",)  # users that run this: what they have is not looked at
    mtls_bootstrap: tuple[str, ...] = ()  # host:port of the listener for certificates; a local broker's is known
    replication: int = Field(default=1, ge=1)
    min_insync_replicas: int = Field(default=1, ge=1)
    secrets: SecretsSpec = SecretsSpec()
    topics: tuple[TopicSpec, ...] = Field(min_length=1)
    principals: tuple[PrincipalSpec, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _sound(self) -> AccessSpec:
        for target in self.targets:
            if target != slug(target):
                raise MendableError(
                    f"target {target!r}: lower-case letters, digits and '-' only", f"write {slug(target)!r}"
                )
        for what, names in (
            ("target", self.targets),
            ("principal", [principal.name for principal in self.principals]),
        ):
            if doubled := [name for name, count in Counter(names).items() if count > 1]:
                raise ValueError(f"{what} {doubled[0]!r} stands twice")
        if not _PREFIX.fullmatch(self.topic_prefix):
            raise ValueError(f"topic_prefix {self.topic_prefix!r} must end with '.'")
        if not _PRINCIPAL.fullmatch(self.principal_prefix):
            raise ValueError(f"principal_prefix {self.principal_prefix!r}: letters, digits, '.', '_' and '-' only")
        self._check_topics()
        for principal in self.principals:
            if principal.name in self.admins:
                raise ValueError(f"principal {principal.name!r} is an admin too")
            if not principal.name.startswith(self.principal_prefix):
                raise ValueError(f"principal {principal.name!r} does not begin with {self.principal_prefix!r}")
            for grant in principal.acls:
                self._check_grant(principal.name, grant)
        return self

    def _check_topics(self) -> None:
        for index, topic in enumerate(self.topics):
            if not topic.name.startswith(self.topic_prefix):
                raise ValueError(f"topic {topic.name!r} does not begin with topic_prefix {self.topic_prefix!r}")
            copies = topic.replication or self.replication
            if (topic.min_insync_replicas or self.min_insync_replicas) > copies:
                raise ValueError(f"topic {topic.name!r}: min_insync_replicas is over replication {copies}")
            for other in self.topics[:index]:
                if _may_collide(topic.name, other.name):
                    raise ValueError(f"topics {other.name!r} and {topic.name!r} collide: one name could be both")
        seen: dict[str, str] = {}
        for name in self.topic_states():
            if (other_name := seen.setdefault(name.replace(".", "_"), name)) != name:
                raise ValueError(f"topics {other_name!r} and {name!r} collide: Kafka takes '.' and '_' for the same")

    def _check_grant(self, principal: str, grant: Grant) -> None:
        if grant.resource != "topic":
            return
        covers = [
            topic.name
            for topic in self.topics
            if (topic.name.startswith(grant.name) if grant.pattern == "prefixed" else topic.name == grant.name)
        ]
        if not covers:
            raise ValueError(
                f"principal {principal!r}: {grant.pattern} topic {grant.name!r} fits no topic of this file"
            )

    def rendered(self, name: str) -> Iterator[str]:
        """A name for each target, or itself where it has none."""
        yield from (name.replace(_TARGET, target) for target in self.targets) if _TARGET in name else (name,)

    def topic_states(self) -> dict[str, TopicState]:
        """Every topic that should be there."""
        return {
            name: TopicState(
                topic.partitions, topic.replication or self.replication, topic.settings(self.min_insync_replicas)
            )
            for topic in self.topics
            for name in self.rendered(topic.name)
        }

    def group_names(self) -> set[tuple[str, str]]:
        """(name, pattern) of every consumer group the file gives rights on."""
        return {(g.name, g.pattern) for p in self.principals for g in p.acls if g.resource == "group"}

    def acls(self) -> frozenset[Acl]:
        """Every rule that should be there."""
        return frozenset(
            Acl(f"User:{principal.name}", "ALLOW", operation, grant.resource, name, grant.pattern)
            for principal in self.principals
            for grant in principal.acls
            for name in self.rendered(grant.name)
            for operation in grant.allow
        )

    def quotas(self) -> dict[str, dict[str, float]]:
        """Quotas of the users that have one."""
        return {p.name: p.quota.values() for p in self.principals if p.quota.values()}

    def probes(self) -> list[Probe]:
        """Every act `access verify` tries for each principal."""
        groups = {name + PROBE_GROUP if pattern == "prefixed" else name for name, pattern in self.group_names()}
        return [
            *(Probe(operation, "topic", topic) for topic in self.topic_states() for operation in TOPIC_OPERATIONS),
            *(Probe(op, "group", group) for group in (*sorted(groups), FOREIGN_GROUP) for op in GROUP_OPERATIONS),
            *(Probe(operation, "cluster", CLUSTER_NAME) for operation in CLUSTER_OPERATIONS),
        ]


def _may_collide(one: str, other: str) -> bool:
    """Whether two templates could give the same name for some target."""
    first, second = one.split("."), other.split(".")
    return len(first) == len(second) and all(a == b or _TARGET in (a, b) for a, b in zip(first, second, strict=True))


def load_spec(file: Path | None, *, targets: Sequence[str] | None = None) -> AccessSpec:
    """The access file; None: the one that comes along. targets: in place of the file's own.

    Raises ConfigError naming file, key and what is wrong.
    """
    path = file or DEFAULT_FILE
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"access file {path} cannot be read: {type(error).__name__}",
            mend="check the path; `draftloop access example` prints a file to start from",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"access file {path} is not TOML: {error}", mend="mend that line") from error
    return parse_spec(values if targets is None else {**values, "targets": list(targets)}, str(path))


def parse_spec(values: Mapping[str, Any], source: str) -> AccessSpec:
    """A spec from the values of a TOML file. Raises ConfigError naming source, key and what is wrong."""
    try:
        return AccessSpec.model_validate(values)
    except ValidationError as error:
        told = explain(error, values, {name: list(model.model_fields) for name, model in _TABLES.items()})
        raise ConfigError(
            f"access file {source}: {told.message}",
            mend=told.mend or "`draftloop access example` prints a file that works, with every key explained",
        ) from None


_TABLES: dict[str, type[BaseModel]] = {
    "": AccessSpec,
    "topics": TopicSpec,
    "principals": PrincipalSpec,
    "acls": Grant,
    "quota": Quota,
    "secrets": SecretsSpec,
}

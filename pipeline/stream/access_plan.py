"""What differs between the access file and the cluster, both ways. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftloop.pipeline.stream.access_rules import ANYONE, Acl
from draftloop.pipeline.stream.access_spec import AccessSpec, TopicState
from draftloop.pipeline.stream.access_words import PLACEHOLDERS, Commands, counted

SCRAM = "SCRAM-SHA-512"
NOBODY = (ANYONE, "User:ANONYMOUS")  # no system of its own: a right of theirs is everybody's
FOREIGN_MEND = "not removed by draftloop, it is on more than its topics: remove it, or add the user to `admins`"
_HARMLESS_ON_CLUSTER = ("IDEMPOTENT_WRITE",)  # a way to write topics one may write anyway


class ClusterState(NamedTuple):
    """What a cluster has. Users are those with a SCRAM secret, with their mechanisms."""

    topics: Mapping[str, TopicState]
    users: Mapping[str, frozenset[str]]
    acls: frozenset[Acl]
    quotas: Mapping[str, Mapping[str, float]]


class Change(NamedTuple):
    """A value that is not as the file says; None: not set."""

    subject: str
    key: str
    now: str | None
    wanted: str | None

    def text(self) -> str:
        return f"{self.subject}: {self.key} {self.now or 'not set'} -> {self.wanted or 'not set'}"


class Plan(NamedTuple):
    """The difference. `extra_*` exists and the file does not know it; `impossible` keeps `apply` from starting."""

    create_topics: Mapping[str, TopicState]
    partitions: tuple[Change, ...]
    configs: tuple[Change, ...]
    users: tuple[str, ...]
    acls: tuple[Acl, ...]
    quotas: tuple[Change, ...]
    clients: tuple[str, ...] = ()  # principals whose client file is missing or out of date
    unfinished: tuple[str, ...] = ()  # users whose new password may or may not have reached the cluster
    without_secret: tuple[str, ...] = ()  # users whose password is nowhere
    extra_acls: tuple[Acl, ...] = ()
    foreign_acls: tuple[Acl, ...] = ()  # extra too, but on more than what is ours: pruning could stop other systems
    extra_topics: tuple[str, ...] = ()
    extra_logins: tuple[tuple[str, str], ...] = ()  # user, SCRAM mechanism
    impossible: tuple[str, ...] = ()
    file_changed: bool = False  # since it was applied last
    commands: Commands = PLACEHOLDERS

    @property
    def extra_users(self) -> list[str]:
        """Users under our prefix with a login that the file does not give them."""
        return [user if mechanism == SCRAM else f"{user} ({mechanism})" for user, mechanism in self.extra_logins]

    @property
    def to_do(self) -> list[str]:
        """What `apply` would do, a line each."""
        return [
            *(
                f"create topic {name}: {counted(topic.partitions, 'partition')},"
                f" {counted(topic.replication, 'copy', 'copies')}"
                for name, topic in self.create_topics.items()
            ),
            *(f"change {change.text()}" for change in (*self.partitions, *self.configs, *self.quotas)),
            *(f"create user {name}" for name in self.users),
            *(f"finish the password of {name}" for name in self.unfinished),
            *(f"write client file of {name}" for name in self.clients),
            *(f"add {acl.text()}" for acl in self.acls),
        ]

    @property
    def extra(self) -> list[str]:
        """What exists and should not, a line each."""
        return [
            *(f"extra ACL: {acl.text()}" for acl in self.extra_acls),
            *(f"extra ACL: {acl.text()} ({FOREIGN_MEND})" for acl in self.foreign_acls),
            *(f"extra topic: {name} (not deleted by draftloop)" for name in self.extra_topics),
            *(f"extra user: {name}" for name in self.extra_users),
        ]

    @property
    def notes(self) -> list[str]:
        """What only a person can decide, each with its command."""
        prunable = [
            counted(len(found), one)
            for found, one in ((self.extra_acls, "extra ACL"), (self.extra_logins, "extra user"))
            if found
        ]
        return [
            *([f"{self.commands.line('apply', '--prune')} removes {' and '.join(prunable)}"] if prunable else []),
            *(
                [
                    f"in the cluster, with passwords that are not here: {', '.join(self.without_secret)};"
                    f" {mend_lost(self.without_secret, self.commands)}"
                ]
                if self.without_secret
                else []
            ),
            *(["the access file has changed since it was applied last"] if self.file_changed and self.to_do else []),
        ]

    @property
    def in_sync(self) -> bool:
        """The cluster has all that the file says and nothing more of ours."""
        return not (self.to_do or self.extra or self.impossible or self.without_secret)

    def to_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "in_sync": self.in_sync,
            "create": {
                "topics": {name: topic._asdict() for name, topic in self.create_topics.items()},
                "users": list(self.users),
                "acls": [acl._asdict() for acl in self.acls],
                "client_files": list(self.clients),
            },
            "change": [change._asdict() for change in (*self.partitions, *self.configs, *self.quotas)],
            "extra": {
                "acls": [acl._asdict() for acl in (*self.extra_acls, *self.foreign_acls)],
                "topics": list(self.extra_topics),
                "users": self.extra_users,
            },
            "unfinished_passwords": list(self.unfinished),
            "without_secret": list(self.without_secret),
            "impossible": list(self.impossible),
        }

    def text(self) -> str:
        """For people."""
        lines = [*(f"IMPOSSIBLE {line}" for line in self.impossible), *self.to_do, *self.extra, *self.notes]
        return "\n".join(lines) if lines else "nothing to do: the cluster is as the access file says"


def mend_lost(names: Sequence[str], commands: Commands) -> str:
    """How users whose passwords are not here get them back."""
    again = commands.line("apply", *(f"--rotate {name}" for name in names))
    return (
        "copy secrets/NAME.password from the home folder that made them and apply again, or"
        f" {again} makes new ones, which cuts off whoever has the old ones"
    )


def difference(spec: AccessSpec, state: ClusterState, *, me: str | None = None) -> Plan:
    """The plan, as far as the cluster alone tells it. me: the administrator that looks, who is never extra."""
    admins = frozenset({*spec.admins, *([me] if me else [])})
    wanted_topics, wanted_acls = spec.topic_states(), spec.acls()
    partitions, configs, impossible = _topic_changes(wanted_topics, state.topics)
    scram = {principal.name for principal in spec.principals if principal.auth == "scram"}
    ours = {name for name in state.users if name.startswith(spec.principal_prefix) and name not in admins}
    strange = sorted(acl for acl in state.acls - wanted_acls if _concerns(spec, admins, acl))
    return Plan(
        create_topics={name: topic for name, topic in wanted_topics.items() if name not in state.topics},
        partitions=tuple(partitions),
        configs=tuple(configs),
        users=tuple(sorted(name for name in scram if SCRAM not in state.users.get(name, ()))),
        acls=tuple(sorted(wanted_acls - state.acls)),
        quotas=tuple(_quota_changes(spec, admins, state.quotas)),
        extra_acls=tuple(acl for acl in strange if not _is_foreign(spec, acl)),
        foreign_acls=tuple(acl for acl in strange if _is_foreign(spec, acl)),
        extra_topics=tuple(
            sorted(t for t in state.topics if t.startswith(spec.topic_prefix) and t not in wanted_topics)
        ),
        extra_logins=tuple(
            (name, mechanism)
            for name in sorted(ours)
            for mechanism in sorted(state.users[name] - ({SCRAM} if name in scram else set()))
        ),
        impossible=tuple(impossible),
    )


def _topic_changes(
    wanted: Mapping[str, TopicState], there: Mapping[str, TopicState]
) -> tuple[list[Change], list[Change], list[str]]:
    """Partitions to add, settings to change, and what Kafka cannot do."""
    partitions: list[Change] = []
    configs: list[Change] = []
    impossible: list[str] = []
    for name in wanted.keys() & there.keys():
        want, have = wanted[name], there[name]
        subject = f"topic {name}"
        if want.partitions > have.partitions:
            partitions.append(Change(subject, "partitions", str(have.partitions), str(want.partitions)))
        if want.partitions < have.partitions:
            impossible.append(
                f"{subject} has {counted(have.partitions, 'partition')}, the file says {want.partitions}:"
                f" partitions can only grow; write {have.partitions}, or make a topic of another name"
            )
        if want.replication != have.replication:
            impossible.append(
                f"{subject} has {counted(have.replication, 'copy', 'copies')}, the file says {want.replication}: write"
                f" {have.replication}, or move its partitions with Kafka's kafka-reassign-partitions first"
            )
        configs += [
            Change(subject, key, have.configs.get(key), want.configs.get(key))
            for key in want.configs.keys() | have.configs.keys()
            if have.configs.get(key) != want.configs.get(key)
        ]
    return sorted(partitions), sorted(configs), sorted(impossible)


def _quota_changes(spec: AccessSpec, admins: frozenset[str], there: Mapping[str, Mapping[str, float]]) -> list[Change]:
    wanted = spec.quotas()
    names = wanted.keys() | {n for n in there if n.startswith(spec.principal_prefix) and n not in admins}
    changes = []
    for name in sorted(names):
        want, have = wanted.get(name, {}), there.get(name, {})
        changes += [
            Change(name, key, _number(have.get(key)), _number(want.get(key)))
            for key in sorted(want.keys() | have.keys())
            if want.get(key) != have.get(key)
        ]
    return changes


def _number(value: float | None) -> str | None:
    return None if value is None else format(value, ".15g")


def _is_ours(spec: AccessSpec, acl: Acl) -> bool:
    """Whether an ACL is for one of our principals, or for one that has taken a name under their prefix."""
    name = acl.principal.removeprefix("User:")
    return name.startswith(spec.principal_prefix) or name in {p.name for p in spec.principals}


def _concerns(spec: AccessSpec, admins: frozenset[str], acl: Acl) -> bool:
    """Whether an ACL is for our principals, or gives anybody else something on what is ours."""
    if acl.principal.removeprefix("User:") in admins:
        return False
    if _is_ours(spec, acl):
        return True
    if acl.permission == "DENY" and acl.principal != ANYONE:
        return False  # it takes nothing from our principals and gives nobody anything
    if acl.resource == "topic":
        return _overlaps(acl, spec.topic_prefix, "prefixed")
    if acl.resource == "group":
        groups = {*spec.group_names(), (spec.topic_prefix, "prefixed")}
        return any(_overlaps(acl, group, pattern) for group, pattern in groups)
    if acl.resource == "cluster":
        return acl.operation not in _HARMLESS_ON_CLUSTER
    if acl.resource == "user":  # tokens to log in as somebody else
        names = {(f"User:{name}", "literal") for name in (*admins, *(p.name for p in spec.principals))}
        return any(_overlaps(acl, *name) for name in names | {(f"User:{spec.principal_prefix}", "prefixed")})
    return acl.resource == "delegation_token" or acl.principal == ANYONE


def _is_foreign(spec: AccessSpec, acl: Acl) -> bool:
    """Whether an extra ACL of somebody else's is on more than what is ours."""
    return acl.resource in ("cluster", "delegation_token") and acl.principal not in NOBODY and not _is_ours(spec, acl)


def _overlaps(acl: Acl, name: str, pattern: str) -> bool:
    """Whether some resource is under both patterns."""
    if acl.pattern == "prefixed":
        return name.startswith(acl.name) or (pattern == "prefixed" and acl.name.startswith(name))
    return acl.name == "*" or acl.name == name or (pattern == "prefixed" and acl.name.startswith(name))

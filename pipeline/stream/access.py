"""Topics, users, ACLs and quotas of a cluster: shown against the access file, brought in line with it, and tried.

`plan` compares, `apply` changes and records every change on the audit topic, `verify` logs in as each principal and
tries every act, allowed and forbidden, and looks for what others may do.
"""

from __future__ import annotations

import secrets as random_secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

from draftloop.pipeline.errors import (
    AuthenticationError,
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    DraftloopError,
)
from draftloop.pipeline.stream.access_plan import FOREIGN_MEND, ClusterState, Plan, difference, mend_lost
from draftloop.pipeline.stream.access_rules import Acl, Cell, Finding, Matrix, Probe, expected_cells, foreign_cells
from draftloop.pipeline.stream.access_secrets import Secrets
from draftloop.pipeline.stream.access_spec import AccessSpec, PrincipalSpec, TopicState, load_spec
from draftloop.pipeline.stream.access_words import PLACEHOLDERS, Commands, counted
from draftloop.pipeline.stream.audit import AUDIT_TOPIC, Audit, audited
from draftloop.pipeline.stream.kafka_config import KafkaConfig

__all__ = ["Applied", "Cluster", "Matrix", "Plan", "Prober", "apply", "load_spec", "plan", "verify"]

PASSWORD_BYTES = 32
SEEN_WITHIN_S = 30.0  # a change the broker does not show after this long is a failure
POLL_S = 0.1


class Cluster(Protocol):
    """A cluster as an administrator sees it. Every method may raise BrokerError."""

    @property
    def principal(self) -> str:
        """Who we are there."""

    def cluster_id(self) -> str: ...

    def state(self, topic_prefix: str) -> ClusterState:
        """What is there now; of the topics only those under the prefix."""

    def create_topic(self, name: str, topic: TopicState) -> None: ...

    def grow_topic(self, name: str, partitions: int) -> None: ...

    def set_configs(self, topic: str, configs: Mapping[str, str | None]) -> None:
        """Set the topic's settings; None takes one back to the cluster's default."""

    def set_password(self, user: str, password: str) -> None:
        """Make a SCRAM-SHA-512 user, or give it another password."""

    def remove_login(self, user: str, mechanism: str) -> None:
        """Take away a user's SCRAM secret of that mechanism."""

    def create_acl(self, acl: Acl) -> None: ...

    def delete_acl(self, acl: Acl) -> None: ...

    def set_quota(self, user: str, values: Mapping[str, float | None]) -> None:
        """Set the user's quotas; None removes one."""


class Prober(Protocol):
    """One principal's connection, for trying acts that leave no trace."""

    def observe(self, probe: Probe) -> str:
        """What the broker does: "allowed", "denied" or "error: CLASS"."""


Connect = Callable[[KafkaConfig], AbstractContextManager[Prober]]


class Applied(NamedTuple):
    """What `apply` did, and what it leaves to a person. `without_secret`: users that got no client file."""

    acts: tuple[str, ...]
    notes: tuple[str, ...]
    without_secret: tuple[str, ...] = ()
    commands: Commands = PLACEHOLDERS

    def to_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "changed": bool(self.acts),
            "acts": list(self.acts),
            "notes": list(self.notes),
            "without_secret": list(self.without_secret),
        }

    def text(self) -> str:
        """For people; every act was told when it was done."""
        if not self.acts and not self.notes:
            return "nothing to do: the cluster is as the access file says"
        done = f"{counted(len(self.acts), 'change')} made" if self.acts else "all that the access file says is there"
        return "\n".join([f"{done}; left to you:" if self.notes else done, *self.notes])

    def check(self) -> None:
        """Raise ConfigError where a user's password is not here, so that it can log in from nowhere."""
        if self.without_secret:
            raise ConfigError(
                f"{counted(len(self.without_secret), 'user')} without a client file, the cluster knows passwords that"
                f" are not here: {', '.join(self.without_secret)}",
                mend=mend_lost(self.without_secret, self.commands),
            )


class _Act(NamedTuple):
    text: str
    subject: str
    do: Callable[[], None]


def plan(
    spec: AccessSpec, cluster: Cluster, secrets: Secrets | None = None, *, commands: Commands = PLACEHOLDERS
) -> Plan:
    """What differs between the access file, the cluster and the passwords kept. Raises BrokerError."""
    found = _difference(spec, cluster)._replace(commands=commands)
    if secrets is None:
        return found
    scram = [principal.name for principal in spec.principals if principal.auth == "scram"]
    there = [name for name in scram if name not in found.users]
    unfinished = tuple(name for name in there if secrets.offered(name) is not None)
    without_secret = tuple(name for name in there if not secrets.kept(name) and name not in unfinished)
    obstacles = tuple(line for principal in spec.principals if (line := secrets.obstacle(principal)))
    return found._replace(
        impossible=(*found.impossible, *obstacles),
        unfinished=unfinished,
        without_secret=without_secret,
        clients=tuple(
            principal.name
            for principal in spec.principals
            # A client file that points at a password that is not there would only look as if it were one.
            if principal.name not in without_secret and secrets.client_differs(principal)
        ),
    )


def apply(
    spec: AccessSpec,
    cluster: Cluster,
    secrets: Secrets,
    audit: Audit,
    *,
    rotate: Sequence[str] = (),
    prune: bool = False,
    on_start: Callable[[], None] | None = None,
    on_act: Callable[[str], None] | None = None,
    commands: Commands = PLACEHOLDERS,
) -> Applied:
    """Bring the cluster in line with the access file; a second time it does nothing. Rights are given last.

    rotate: users that get a new password. prune: extra ACLs and extra users' logins are removed; topics never are.
    on_start: called before the first change, once nothing stands against any. Raises ConfigError before anything is
    done, BrokerError and StorageError in between: what was done stays, run it again. `Applied.check` judges.
    """
    scram = {principal.name for principal in spec.principals if principal.auth == "scram"}
    if unknown := sorted(set(rotate) - scram):
        raise ConfigError(
            f"rotate {unknown[0]!r}: no such user in the access file", mend=f"users: {', '.join(sorted(scram))}"
        )
    found = plan(spec, cluster, secrets, commands=commands)
    if found.impossible:
        raise ConfigError(
            "\n  ".join(("the access file asks for what cannot be done:", *found.impossible)),
            mend="correct the access file; nothing was changed",
        )
    if found.to_do and not rotate and scram and scram == set(found.without_secret):
        raise ConfigError(
            "none of the users' passwords are here: this cluster is kept from another home, nothing was changed",
            mend=mend_lost(found.without_secret, commands),
        )
    if on_start:
        on_start()
    done: list[str] = []

    def tell(what: str) -> None:
        done.append(what)
        if on_act:
            on_act(what)

    if AUDIT_TOPIC in found.create_topics:
        tell(_bootstrap(spec, cluster, audit, found.create_topics[AUDIT_TOPIC]))
    for act in _acts(spec, cluster, secrets, found, set(rotate), prune):
        with audited(audit, "access.change", by=cluster.principal, subject=act.subject, details={"what": act.text}):
            try:
                act.do()
            except DraftloopError as error:
                error.message = f"{act.text}: {error.message}" + (
                    f" ({counted(len(done), 'act')} before it {'is' if len(done) == 1 else 'are'} done)" if done else ""
                )
                raise
        tell(act.text)
    if done:
        _wait(spec, cluster, lambda seen: not seen.to_do and not (prune and (seen.extra_acls or seen.extra_logins)))
    left = plan(spec, cluster, secrets, commands=commands)
    return Applied(tuple(done), (*left.extra, *left.notes), left.without_secret, commands)


def verify(
    spec: AccessSpec,
    clients: Callable[[str], KafkaConfig],
    on_progress: Callable[[str], None] | None = None,
    *,
    cluster: Cluster | None = None,
    connect: Connect | None = None,
    commands: Commands = PLACEHOLDERS,
) -> Matrix:
    """Log in as each principal and try every act, allowed and forbidden, leaving no trace.

    clients: the configuration a principal logs in with. cluster: the administrator's view, in which rights of others,
    unknown users and settings that drifted are looked for (None: only the tries). connect: opens a principal's
    connection (None: Kafka). Raises BrokerUnreachableError where there is no broker at all. `Matrix.check` judges.
    """
    if connect is None:
        from draftloop.pipeline.stream.kafka_tries import KafkaProber

        connect = KafkaProber
    probes, acls = spec.probes(), spec.acls()
    cells: list[Cell] = []
    findings: list[Finding] = []
    for principal in spec.principals:
        if on_progress:
            on_progress(f"{principal.name}: {len(probes)} acts")
        observed, shut_out = _observe(principal, clients, connect, probes, commands)
        findings += [shut_out] if shut_out else []
        cells += [
            Cell(name, probe.operation, probe.shown, expected, observed[probe])
            for name, probe, expected in expected_cells(tuple(acls), [principal.name], probes)
        ]
    if cluster is None:
        return Matrix(tuple(cells), tuple(findings), commands=commands)
    found = _difference(spec, cluster)
    known = {f"User:{principal.name}" for principal in spec.principals}
    strange = [
        acl
        for acl in (*found.extra_acls, *found.foreign_acls)
        if acl.permission == "ALLOW" and acl.principal not in known
    ]
    return Matrix(
        tuple(cells),
        (*findings, *_strays(found, commands)),
        foreign_cells(strange, probes),
        found.extra_topics,
        commands,
    )


def _strays(found: Plan, commands: Commands) -> Iterator[Finding]:
    """What is in the cluster that no principal's tries show: rights of others, users, settings."""
    prune, again = commands.line("apply", "--prune"), commands.line("apply")
    for acl in found.extra_acls:
        kind = "denying" if acl.permission == "DENY" else "extra"
        yield Finding(
            "denying_acl" if kind == "denying" else "extra_acl",
            f"{kind} ACL that the access file does not have: {acl.text()}",
            f"{prune} removes extra ACLs and users",
        )
    for acl in found.foreign_acls:
        yield Finding(
            "extra_acl",
            f"extra ACL that the access file does not have: {acl.text()}",
            f"{acl.principal}: {FOREIGN_MEND}",
        )
    for name in found.extra_users:
        yield Finding(
            "extra_user", f"user {name} that the access file does not have", f"{prune} removes extra ACLs and users"
        )
    for change in (*found.partitions, *found.configs, *found.quotas):
        yield Finding("drift", f"changed since it was applied: {change.text()}", f"{again} puts it back")
    for line in found.impossible:
        yield Finding("drift", line, "correct the access file")


def _observe(
    principal: PrincipalSpec,
    clients: Callable[[str], KafkaConfig],
    connect: Connect,
    probes: Sequence[Probe],
    commands: Commands,
) -> tuple[Mapping[Probe, str], Finding | None]:
    """What the broker does on each act of one principal, and why it cannot come in where it cannot."""
    config = None
    try:
        config = clients(principal.name)
        with connect(config) as prober:
            return {probe: prober.observe(probe) for probe in probes}, None
    except BrokerUnreachableError:
        raise
    except DraftloopError as error:
        what = f"{principal.name} cannot log in: {type(error).__name__}: {error.message}"
        mend = _login_mend(principal.name, config, error, commands)
        # Not "denied": a principal that cannot come in proves nothing about its rights.
        return dict.fromkeys(probes, f"error: {type(error).__name__}"), Finding("login", what, mend, principal.name)


def _login_mend(name: str, config: KafkaConfig | None, error: DraftloopError, commands: Commands) -> str:
    if config is None:
        return f"{commands.line('apply')} writes the client file of {name}"
    security = config.required()
    new = f"{commands.line('apply', '--rotate', name)} gives {name} a new password"
    if isinstance(error, AuthenticationError | ConfigError) and security.password_file is not None:
        return f"put the right password into {security.password_file}, or {new}"
    if isinstance(error, AuthenticationError) and security.password_env is not None:
        return f"put the right password into the environment variable {security.password_env}, or {new}"
    return error.mend or commands.line("plan")


def _acts(
    spec: AccessSpec, cluster: Cluster, secrets: Secrets, found: Plan, rotate: set[str], prune: bool
) -> Iterator[_Act]:
    """What to do, in an order in which no right exists before what it is a right on, and rights are given last."""
    for name, topic in found.create_topics.items():
        if name != AUDIT_TOPIC:
            yield _Act(f"create topic {name}", name, partial(cluster.create_topic, name, topic))
    for change in found.partitions:
        name = change.subject.removeprefix("topic ")
        yield _Act(f"change {change.text()}", name, partial(cluster.grow_topic, name, int(change.wanted or 0)))
    for change in found.configs:
        name = change.subject.removeprefix("topic ")
        yield _Act(f"change {change.text()}", name, partial(cluster.set_configs, name, {change.key: change.wanted}))
    for change in found.quotas:
        wanted = {change.key: None if change.wanted is None else float(change.wanted)}
        yield _Act(f"change {change.text()}", change.subject, partial(cluster.set_quota, change.subject, wanted))
    for name in sorted({*found.users, *found.unfinished, *rotate}):
        what = (
            "create user" if name in found.users else "rotate password of" if name in rotate else "finish password of"
        )
        give = partial(_give_password, cluster, secrets, name, new=name in rotate)
        yield _Act(f"{what} {name}", name, give)
    regained = rotate & set(found.without_secret)
    for principal in spec.principals:
        if principal.name in found.clients or (principal.name in regained and secrets.client_differs(principal)):
            yield _Act(
                f"write client file of {principal.name}", principal.name, partial(secrets.write_client, principal)
            )
    for acl in found.acls:
        yield _Act(f"add {acl.text()}", acl.name, partial(cluster.create_acl, acl))
    for acl in found.extra_acls if prune else ():
        yield _Act(f"remove {acl.text()}", acl.name, partial(cluster.delete_acl, acl))
    for user, mechanism in found.extra_logins if prune else ():
        yield _Act(f"remove user {user} ({mechanism})", user, partial(cluster.remove_login, user, mechanism))


def _give_password(cluster: Cluster, secrets: Secrets, user: str, *, new: bool) -> None:
    """Set the kept password, or a new one that is kept before the cluster has it: a crash in between loses neither."""
    offered = secrets.offered(user)
    if offered is not None:
        cluster.set_password(user, offered)
        secrets.settle(user)
        if not new:
            return
    elif not new and (kept := secrets.current(user)) is not None:
        cluster.set_password(user, kept)
        return
    password = random_secrets.token_urlsafe(PASSWORD_BYTES)
    secrets.offer(user, password)
    cluster.set_password(user, password)
    secrets.settle(user)


def _bootstrap(spec: AccessSpec, cluster: Cluster, audit: Audit, topic: TopicState) -> str:
    """Make the audit topic, before which nothing can be recorded, and record that."""
    what = f"create topic {AUDIT_TOPIC}"
    cluster.create_topic(AUDIT_TOPIC, topic)
    _wait(spec, cluster, lambda found: AUDIT_TOPIC not in found.create_topics)
    with audited(audit, "access.change", by=cluster.principal, subject=AUDIT_TOPIC, details={"what": what}):
        pass
    return what


def _difference(spec: AccessSpec, cluster: Cluster) -> Plan:
    return difference(spec, cluster.state(spec.topic_prefix), me=cluster.principal)


def _wait(spec: AccessSpec, cluster: Cluster, enough: Callable[[Plan], bool]) -> None:
    """Until the cluster shows what was done: it answers before every broker knows."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not enough(found := _difference(spec, cluster)):
        if time.monotonic() > deadline:
            raise BrokerError(
                f"the cluster took every change and does not show it after {SEEN_WITHIN_S:.0f} s:"
                f" {'; '.join((*found.to_do, *found.extra)[:5])}",
                mend="`access plan` of this home shows the difference; is somebody else changing it too?",
            )
        time.sleep(POLL_S)

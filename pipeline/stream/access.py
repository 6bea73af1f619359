"""Topics, users, ACLs and quotas of a cluster: shown against the access file, brought in line with it, and tried.

`plan` compares, `apply` changes and records every change on the audit topic, `verify` logs in as each principal and
tries every act, allowed and forbidden.
"""

from __future__ import annotations

import secrets as random_secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

from draftloop.pipeline.errors import BrokerError, BrokerUnreachableError, ConfigError, DraftloopError
from draftloop.pipeline.stream.access_plan import ClusterState, Plan, difference
from draftloop.pipeline.stream.access_rules import Acl, Cell, Matrix, Probe, expected_cells
from draftloop.pipeline.stream.access_secrets import Secrets
from draftloop.pipeline.stream.access_spec import AccessSpec, TopicState, load_spec
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
    """What `apply` did, and what it leaves to a person."""

    acts: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {"changed": bool(self.acts), "acts": list(self.acts), "notes": list(self.notes)}

    def text(self) -> str:
        """For people."""
        return "\n".join([*(self.acts or ("nothing to do: the cluster is as the access file says",)), *self.notes])


class _Act(NamedTuple):
    text: str
    subject: str
    do: Callable[[], None]


def plan(spec: AccessSpec, cluster: Cluster, secrets: Secrets | None = None) -> Plan:
    """What differs between the access file, the cluster and the passwords kept. Raises BrokerError."""
    found = difference(spec, cluster.state(spec.topic_prefix))
    if secrets is None:
        return found
    scram = [principal.name for principal in spec.principals if principal.auth == "scram"]
    there = [name for name in scram if name not in found.users]
    unfinished = tuple(name for name in there if secrets.offered(name) is not None)
    obstacles = tuple(line for principal in spec.principals if (line := secrets.obstacle(principal)))
    return found._replace(
        impossible=(*found.impossible, *obstacles),
        unfinished=unfinished,
        without_secret=tuple(name for name in there if not secrets.kept(name) and name not in unfinished),
        clients=tuple(principal.name for principal in spec.principals if secrets.client_differs(principal)),
    )


def apply(
    spec: AccessSpec,
    cluster: Cluster,
    secrets: Secrets,
    audit: Audit,
    *,
    rotate: Sequence[str] = (),
    prune: bool = False,
    on_act: Callable[[str], None] | None = None,
) -> Applied:
    """Bring the cluster in line with the access file; a second time it does nothing. Rights are given last.

    rotate: users that get a new password. prune: extra ACLs are removed; extra topics and users never are. Raises
    ConfigError before anything is done, BrokerError and StorageError in between: what was done stays, run it again.
    """
    scram = {principal.name for principal in spec.principals if principal.auth == "scram"}
    if unknown := sorted(set(rotate) - scram):
        raise ConfigError(
            f"rotate {unknown[0]!r}: no such user in the access file", mend=f"users: {', '.join(sorted(scram))}"
        )
    found = plan(spec, cluster, secrets)
    if found.impossible:
        raise ConfigError("; ".join(found.impossible), mend="correct the access file")
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
                    f" ({len(done)} acts before it are done)" if done else ""
                )
                raise
        tell(act.text)
    if done:
        _wait(spec, cluster, lambda seen: not seen.to_do and not (prune and seen.extra_acls))
    left = plan(spec, cluster, secrets)
    return Applied(tuple(done), (*left.notes, *left.extra))


def verify(
    spec: AccessSpec,
    clients: Callable[[str], KafkaConfig],
    on_progress: Callable[[str], None] | None = None,
    *,
    connect: Connect | None = None,
) -> Matrix:
    """Log in as each principal and try every act, allowed and forbidden, leaving no trace.

    clients: the configuration a principal logs in with. connect: opens its connection (None: Kafka). A principal that
    cannot log in has error cells. Raises BrokerUnreachableError where there is no broker at all. `Matrix.check` judges.
    """
    if connect is None:
        from draftloop.pipeline.stream.kafka_tries import KafkaProber

        connect = KafkaProber
    probes, acls = spec.probes(), spec.acls()
    cells: list[Cell] = []
    for principal in spec.principals:
        if on_progress:
            on_progress(f"{principal.name}: {len(probes)} acts")
        observed = _observe(principal.name, clients, connect, probes)
        cells += [
            Cell(name, probe.operation, probe.shown, expected, observed[probe])
            for name, probe, expected in expected_cells(tuple(acls), [principal.name], probes)
        ]
    return Matrix(tuple(cells))


def _observe(
    principal: str, clients: Callable[[str], KafkaConfig], connect: Connect, probes: Sequence[Probe]
) -> dict[Probe, str]:
    """What the broker does on each act of one principal."""
    try:
        with connect(clients(principal)) as prober:
            return {probe: prober.observe(probe) for probe in probes}
    except BrokerUnreachableError:
        raise
    except DraftloopError as error:
        # Not "denied": a principal that cannot come in proves nothing about its rights.
        return dict.fromkeys(probes, f"error: {type(error).__name__}")


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
    for principal in spec.principals:
        if principal.name in found.clients:
            yield _Act(
                f"write client file of {principal.name}", principal.name, partial(secrets.write_client, principal)
            )
    for acl in found.acls:
        yield _Act(f"add {acl.text()}", acl.name, partial(cluster.create_acl, acl))
    for acl in found.extra_acls if prune else ():
        yield _Act(f"remove {acl.text()}", acl.name, partial(cluster.delete_acl, acl))


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


def _wait(spec: AccessSpec, cluster: Cluster, enough: Callable[[Plan], bool]) -> None:
    """Until the cluster shows what was done: it answers before every broker knows."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not enough(found := difference(spec, cluster.state(spec.topic_prefix))):
        if time.monotonic() > deadline:
            raise BrokerError(
                f"the cluster took every change and does not show it after {SEEN_WITHIN_S:.0f} s:"
                f" {'; '.join(found.to_do[:5])}",
                mend="`draftloop access plan` shows the difference; is somebody else changing it too?",
            )
        time.sleep(POLL_S)

"""The plan against a cluster, what apply does and what verify sees; all on the in-memory twin."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import PRINCIPALS, small, spec_of

from draftloop.pipeline.errors import (
    AccessDeniedError,
    AccessSurpriseError,
    BrokerUnreachableError,
    ConfigError,
    StorageError,
)
from draftloop.pipeline.stream import access
from draftloop.pipeline.stream.access_memory import MemoryCluster
from draftloop.pipeline.stream.access_plan import difference
from draftloop.pipeline.stream.access_rules import (
    CLUSTER_OPERATIONS,
    GROUP_OPERATIONS,
    TOPIC_OPERATIONS,
    Acl,
    Cell,
    Finding,
    expected_cells,
)
from draftloop.pipeline.stream.access_secrets import SecretFolder, open_secrets
from draftloop.pipeline.stream.access_spec import AccessSpec, TopicState, load_spec, parse_spec
from draftloop.pipeline.stream.audit import AUDIT_TOPIC, MemoryAudit
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity, read_client

PRUNE = "`draftloop access apply --home HOME --access FILE --prune`"


def admin_config() -> KafkaConfig:
    login = KafkaSecurity(username="admin", password_file=Path("/none"), ca_file=Path("/ca.pem"))
    return KafkaConfig(bootstrap=("127.0.0.1:9",), cluster_id="memory", security=login)


class Stage:
    """A twin cluster, a home folder and an audit, ready for apply."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cluster = MemoryCluster()
        self.audit = MemoryAudit()

    def apply(self, spec: AccessSpec, **options: Any) -> access.Applied:
        secrets = open_secrets(spec, self.home, admin_config())
        return access.apply(spec, self.cluster, secrets, self.audit, **options)

    def plan(self, spec: AccessSpec) -> access.Plan:
        return access.plan(spec, self.cluster, open_secrets(spec, self.home, admin_config()))

    def verify(self, spec: AccessSpec) -> access.Matrix:
        return access.verify(spec, self.client, connect=self.cluster.connect, cluster=self.cluster)

    def client(self, principal: str) -> KafkaConfig:
        return read_client(self.home / "clients" / f"{principal}.toml")

    def password_file(self, principal: str) -> Path:
        return self.home / "secrets" / f"{principal}.password"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


TOPIC_NAMES = ("draftloop.raw.{target}", "draftloop.curated.{target}", "draftloop.audit", "draftloop.consent")


@st.composite
def specs(draw: st.DrawFn) -> AccessSpec:
    """Sound access files: some of a few topics, a few principals with any rights on them."""
    names = draw(st.lists(st.sampled_from(TOPIC_NAMES), min_size=1, unique=True))
    grant_on = [
        *({"topic": name} for name in names),
        *({"topic_prefix": name.rpartition(".")[0] + "."} for name in names),
        {"group": "draftloop.g"},
        {"group_prefix": "draftloop.groups."},
        {"cluster": True},
    ]

    def grant(where: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        key = next(iter(where))
        known = TOPIC_OPERATIONS if key.startswith("topic") else GROUP_OPERATIONS
        known = CLUSTER_OPERATIONS if key == "cluster" else known
        operations = st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True)
        return operations.map(lambda allow: {"allow": allow, **where})

    rates = st.none() | st.integers(1, 10**9)
    principals = draw(st.lists(st.sampled_from(PRINCIPALS), min_size=1, max_size=3, unique=True))
    return parse_spec(
        {
            "targets": draw(st.lists(st.sampled_from(["a", "ab", "b"]), min_size=1, unique=True)),
            "topics": [
                {
                    "name": name,
                    "partitions": draw(st.integers(1, 4)),
                    "retention": draw(st.sampled_from(["1h", "3d", "forever"])),
                }
                for name in names
            ],
            "principals": [
                {
                    "name": f"draftloop-{name}",
                    "acls": draw(st.lists(st.sampled_from(grant_on).flatmap(grant), max_size=3)),
                    "quota": {
                        key: value
                        for key in ("producer_byte_rate", "consumer_byte_rate")
                        if (value := draw(rates)) is not None
                    },
                }
                for name in principals
            ],
        },
        "random",
    )


@given(first=specs(), second=specs())
@settings(max_examples=60, deadline=None)
def test_after_apply_the_plan_is_empty_whatever_was_there_before(first: AccessSpec, second: AccessSpec) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        stage.apply(first)
        assert stage.plan(first).in_sync
        acts = len(stage.audit.records)
        assert stage.apply(first).acts == ()
        assert len(stage.audit.records) == acts
        assert not stage.verify(first).surprises

        if stage.plan(second).impossible:
            with pytest.raises(ConfigError, match="can only grow"):
                stage.apply(second, prune=True)
            return
        stage.apply(second, prune=True)
        left = stage.plan(second)
        assert (left.to_do, left.extra_acls) == ([], ())
        assert set(left.extra_topics) == set(first.topic_states()) - set(second.topic_states())
        assert not stage.verify(second).surprises


@given(spec=specs())
@settings(max_examples=100, deadline=None)
def test_the_expected_matrix_is_what_the_grants_say_one_by_one(spec: AccessSpec) -> None:
    stands_for = {"READ": ["DESCRIBE"], "WRITE": ["DESCRIBE"], "DELETE": ["DESCRIBE"], "ALTER": ["DESCRIBE"]}
    stands_for["ALTER_CONFIGS"] = ["DESCRIBE_CONFIGS"]
    names = {
        "topic": list(spec.topic_states()),
        "group": ["draftloop.g", "draftloop.groups.access-verify", "access-verify.foreign"],
        "cluster": ["kafka-cluster"],
    }
    granted = set()
    for principal in spec.principals:
        for grant in principal.acls:
            if grant.pattern == "prefixed":
                covered = [name for name in names[grant.resource] if name[: len(grant.name)] == grant.name]
            elif "{target}" in grant.name:
                covered = [grant.name.replace("{target}", target) for target in spec.targets]
            else:
                covered = [grant.name]
            for operation in grant.allow:
                for implied in (operation, *stands_for.get(operation, [])):
                    granted |= {(principal.name, implied, grant.resource, name) for name in covered}
    cells = expected_cells(tuple(spec.acls()), [principal.name for principal in spec.principals], spec.probes())
    assert len(cells) == len(spec.principals) * len(spec.probes())
    for principal_name, probe, expected in cells:
        assert (expected == "allowed") is ((principal_name, *probe) in granted), (principal_name, probe)


# --- plan ---


def test_the_plan_of_an_empty_cluster_lists_everything(stage: Stage) -> None:
    found = stage.plan(spec_of())
    assert found.to_do == [
        "create topic draftloop.raw.m: 2 partitions, 1 copy",
        "create topic draftloop.audit: 1 partition, 1 copy",
        "create user draftloop-hook",
        "create user draftloop-reader",
        "write client file of draftloop-hook",
        "write client file of draftloop-reader",
        "add allow User:draftloop-hook WRITE on topic draftloop.raw.*",
        "add allow User:draftloop-reader READ on topic draftloop.raw.m",
    ]
    assert found.extra == []
    json.dumps(found.to_dict())


def change_topic(**changes: Any) -> Callable[[Stage], None]:
    def change(stage: Stage) -> None:
        stage.cluster.topics["draftloop.raw.m"] = stage.cluster.topics["draftloop.raw.m"]._replace(**changes)

    return change


def set_config(key: str, value: str | None) -> Callable[[Stage], None]:
    return lambda stage: stage.cluster.set_configs("draftloop.raw.m", {key: value})


def foreign(acl: Acl) -> Callable[[Stage], None]:
    return lambda stage: stage.cluster.create_acl(acl)


MISSING = Acl("User:draftloop-reader", "ALLOW", "READ", "topic", "draftloop.raw.m", "literal")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (change_topic(partitions=1), "change topic draftloop.raw.m: partitions 1 -> 2"),
        (change_topic(partitions=3), "IMPOSSIBLE topic draftloop.raw.m has 3 partitions, the file says 2"),
        (change_topic(replication=3), "IMPOSSIBLE topic draftloop.raw.m has 3 copies, the file says 1"),
        (set_config("retention.ms", "1"), "change topic draftloop.raw.m: retention.ms 1 -> 259200000"),
        (set_config("retention.ms", None), "change topic draftloop.raw.m: retention.ms not set -> 259200000"),
        (set_config("retention.bytes", "9"), "change topic draftloop.raw.m: retention.bytes 9 -> not set"),
        (lambda s: s.cluster.topics.pop("draftloop.raw.m"), "create topic draftloop.raw.m: 2 partitions, 1 copy"),
        (lambda s: s.cluster.passwords.pop("draftloop-hook"), "create user draftloop-hook"),
        (lambda s: s.cluster.delete_acl(MISSING), "add allow User:draftloop-reader READ on topic draftloop.raw.m"),
        (
            lambda s: s.cluster.set_quota("draftloop-hook", {"request_percentage": 5.0}),
            "change draftloop-hook: request_percentage 5 -> not set",
        ),
        (lambda s: (s.home / "clients" / "draftloop-hook.toml").unlink(), "write client file of draftloop-hook"),
        (
            lambda s: s.password_file("draftloop-hook").unlink(),
            "in the cluster, with passwords that are not here: draftloop-hook; copy secrets/NAME.password from the home"
            " folder that made them and apply again, or"
            " `draftloop access apply --home HOME --access FILE --rotate draftloop-hook` makes new ones",
        ),
        (
            lambda s: s.cluster.create_topic("draftloop.old", TopicState(1, 1, {})),
            "extra topic: draftloop.old (not deleted by draftloop)",
        ),
        (
            lambda s: s.cluster.set_password("draftloop-old", "x"),
            f"extra user: draftloop-old\n{PRUNE} removes 1 extra user",
        ),
        (
            foreign(MISSING._replace(principal="User:draftloop-hook")),
            f"extra ACL: allow User:draftloop-hook READ on topic draftloop.raw.m\n{PRUNE} removes 1 extra ACL",
        ),
        (
            foreign(Acl("User:spy", "ALLOW", "READ", "topic", "draft", "prefixed")),
            "extra ACL: allow User:spy READ on topic draft*\n",
        ),
        (
            foreign(Acl("User:spy", "ALLOW", "ALL", "topic", "*", "literal", "10.0.0.1")),
            "extra ACL: allow User:spy ALL on topic * from 10.0.0.1\n",
        ),
        (
            foreign(Acl("User:draftloop-hook", "DENY", "WRITE", "topic", "draftloop.raw.m", "literal")),
            "extra ACL: deny User:draftloop-hook WRITE on topic draftloop.raw.m\n",
        ),
        (
            foreign(Acl("User:*", "ALLOW", "ALTER", "cluster", "kafka-cluster", "literal")),
            "extra ACL: allow User:* ALTER on cluster\n",
        ),
        (
            foreign(Acl("User:draftloop-hook", "ALLOW", "WRITE", "transactional_id", "x", "literal")),
            "extra ACL: allow User:draftloop-hook WRITE on transactional_id x\n",
        ),
    ],
)
def test_each_kind_of_difference_is_told(stage: Stage, damage: Callable[[Stage], Any], told: str) -> None:
    spec = spec_of()
    stage.apply(spec)
    damage(stage)
    text = stage.plan(spec).text()
    assert text.startswith(told), text
    assert len(text.splitlines()) == 1 + ("--prune" in text)
    assert not stage.plan(spec).in_sync


@pytest.mark.parametrize(
    "acl",
    [
        Acl("User:other", "ALLOW", "READ", "topic", "elsewhere.raw", "literal"),
        Acl("User:other", "ALLOW", "IDEMPOTENT_WRITE", "cluster", "kafka-cluster", "literal"),
        Acl("User:other", "DENY", "ALL", "topic", "*", "literal"),
        Acl("User:other", "ALLOW", "READ", "group", "elsewhere", "literal"),
        Acl("User:other", "ALLOW", "CREATE_TOKENS", "user", "User:elsewhere", "literal"),
        Acl("User:*", "ALLOW", "READ", "topic", "elsewhere.", "prefixed"),
        Acl("User:admin", "ALLOW", "ALTER", "topic", "draftloop.", "prefixed"),
    ],
)
def test_what_is_not_ours_is_left_alone(stage: Stage, acl: Acl) -> None:
    spec = spec_of()
    stage.apply(spec)
    stage.cluster.create_acl(acl)
    stage.cluster.create_topic("elsewhere.raw", TopicState(1, 1, {}))
    stage.cluster.set_password("other", "x")
    assert stage.plan(spec).in_sync
    assert stage.apply(spec, prune=True).acts == ()
    assert acl in stage.cluster.acls


# --- apply ---


def test_passwords_and_client_files_are_private_and_log_in(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    for name in ("draftloop-hook", "draftloop-reader"):
        password = stage.password_file(name)
        assert stat.S_IMODE(password.stat().st_mode) == 0o600
        assert stat.S_IMODE((stage.home / "clients" / f"{name}.toml").stat().st_mode) == 0o600
        assert len(password.read_text().strip()) >= 43
        assert password.read_text().strip() == stage.cluster.passwords[name]
        assert stage.client(name) == KafkaConfig(
            bootstrap=("127.0.0.1:9",),
            cluster_id="memory",
            security=KafkaSecurity(username=name, password_file=password, ca_file=Path("/ca.pem")),
        )
    assert stat.S_IMODE((stage.home / "secrets").stat().st_mode) == 0o700
    assert len(set(stage.cluster.passwords.values())) == 2


def test_a_second_apply_keeps_every_file_as_it_is(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in stage.home.rglob("*") if file.is_file()}
    assert stage.apply(spec).text() == "nothing to do: the cluster is as the access file says"
    assert before == {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in stage.home.rglob("*") if f.is_file()}


def test_rotate_changes_one_password_and_no_other(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    before = dict(stage.cluster.passwords)
    assert stage.apply(spec, rotate=["draftloop-hook"]).acts == ("rotate password of draftloop-hook",)
    assert stage.cluster.passwords["draftloop-hook"] != before["draftloop-hook"]
    assert stage.cluster.passwords["draftloop-reader"] == before["draftloop-reader"]
    assert stage.password_file("draftloop-hook").read_text().strip() == stage.cluster.passwords["draftloop-hook"]
    assert not stage.verify(spec).surprises
    with pytest.raises(ConfigError, match="rotate 'draftloop-nobody': no such user"):
        stage.apply(spec, rotate=["draftloop-nobody"])


def test_a_user_without_its_password_is_told_until_it_is_rotated(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    stage.password_file("draftloop-hook").unlink()
    applied = stage.apply(spec)
    assert applied.acts == ()
    assert "`draftloop access apply --home HOME --access FILE --rotate draftloop-hook`" in applied.notes[0]
    with pytest.raises(ConfigError, match="1 user without a client file"):
        applied.check()
    rotated = stage.apply(spec, rotate=["draftloop-hook"])
    assert rotated.notes == ()
    rotated.check()


def test_a_second_home_gets_no_client_files_that_point_at_passwords_it_does_not_have(
    stage: Stage, tmp_path: Path
) -> None:
    spec = spec_of()
    stage.apply(spec)
    second = Stage(tmp_path / "second")
    second.cluster = stage.cluster
    assert second.plan(spec).to_do == []
    assert not second.plan(spec).in_sync
    applied = second.apply(spec)
    assert applied.acts == ()
    assert applied.without_secret == ("draftloop-hook", "draftloop-reader")
    assert not (second.home / "clients").exists()
    assert not applied.text().startswith("nothing to do")
    with pytest.raises(ConfigError) as refused:
        applied.check()
    assert refused.value.message == (
        "2 users without a client file, the cluster knows passwords that are not here: draftloop-hook, draftloop-reader"
    )
    assert "copy secrets/NAME.password" in (refused.value.mend or "")

    assert second.apply(spec, rotate=["draftloop-hook"]).acts == (
        "rotate password of draftloop-hook",
        "write client file of draftloop-hook",
    )
    shutil.copy(stage.password_file("draftloop-reader"), second.password_file("draftloop-reader"))
    applied = second.apply(spec)
    assert applied.acts == ("write client file of draftloop-reader",)
    applied.check()
    assert not second.verify(spec).surprises


def test_a_second_home_with_another_file_changes_nothing(stage: Stage, tmp_path: Path) -> None:
    stage.apply(spec_of())
    second = Stage(tmp_path / "second")
    second.cluster = stage.cluster
    topics = dict(stage.cluster.topics)
    more = [topic.model_copy(update={"partitions": topic.partitions + 1}) for topic in spec_of().topics]
    other = spec_of().model_copy(update={"topics": tuple(more)})
    assert second.plan(other).to_do
    with pytest.raises(ConfigError, match="kept from another home") as refused:
        second.apply(other)
    assert "copy secrets/NAME.password" in (refused.value.mend or "")
    assert stage.cluster.topics == topics


def test_a_lost_user_gets_back_the_password_that_is_kept(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    kept = stage.password_file("draftloop-hook").read_text()
    del stage.cluster.passwords["draftloop-hook"]
    stage.apply(spec)
    assert stage.password_file("draftloop-hook").read_text() == kept
    assert stage.cluster.passwords["draftloop-hook"] == kept.strip()


@pytest.mark.parametrize("reached", [False, True])
def test_a_crash_in_the_middle_of_a_rotation_loses_no_password(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    spec = spec_of()
    stage.apply(spec)
    set_password = stage.cluster.set_password

    def crash(user: str, password: str) -> None:
        if reached:
            set_password(user, password)
        raise BrokerUnreachableError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(stage.cluster, "set_password", crash)
        with pytest.raises(BrokerUnreachableError, match="rotate password of draftloop-hook: gone"):
            stage.apply(spec, rotate=["draftloop-hook"])
    assert stage.plan(spec).to_do == ["finish the password of draftloop-hook"]
    stage.apply(spec)
    assert stage.plan(spec).in_sync
    assert not stage.verify(spec).surprises


def test_extra_acls_and_users_go_only_with_prune_and_extra_topics_never(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    extra = Acl("User:draftloop-hook", "ALLOW", "READ", "topic", "draftloop.raw.", "prefixed")
    stage.cluster.create_acl(extra)
    stage.cluster.create_topic("draftloop.old", TopicState(1, 1, {}))
    stage.cluster.set_password("draftloop-old", "x")
    stage.cluster.set_password("other", "x")
    told = stage.apply(spec)
    assert told.acts == ()
    assert told.text() == (
        "all that the access file says is there; left to you:\n"
        "extra ACL: allow User:draftloop-hook READ on topic draftloop.raw.*\n"
        "extra topic: draftloop.old (not deleted by draftloop)\n"
        "extra user: draftloop-old\n"
        f"{PRUNE} removes 1 extra ACL and 1 extra user"
    )
    assert extra in stage.cluster.acls
    assert "draftloop-old" in stage.cluster.passwords
    before = len(stage.audit.records)
    applied = stage.apply(spec, prune=True)
    assert applied.acts == (
        "remove allow User:draftloop-hook READ on topic draftloop.raw.*",
        "remove user draftloop-old (SCRAM-SHA-512)",
    )
    assert [(r.details["what"], r.subject, r.outcome) for r in stage.audit.records[before + 2 :]] == [
        ("remove user draftloop-old (SCRAM-SHA-512)", "draftloop-old", outcome) for outcome in ("begun", "done")
    ]
    assert applied.notes == ("extra topic: draftloop.old (not deleted by draftloop)",)
    assert "draftloop.old" in stage.cluster.topics
    assert set(stage.cluster.passwords) == {"draftloop-hook", "draftloop-reader", "other"}


def test_a_login_of_another_kind_of_one_of_our_users_is_an_extra_one(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    state = stage.cluster.state("draftloop.")
    both = state._replace(users={**state.users, "draftloop-hook": frozenset({"SCRAM-SHA-256", "SCRAM-SHA-512"})})
    found = difference(spec, both)
    assert found.extra == ["extra user: draftloop-hook (SCRAM-SHA-256)"]
    assert found.extra_logins == (("draftloop-hook", "SCRAM-SHA-256"),)


def test_a_right_of_others_on_the_whole_cluster_is_told_and_not_pruned(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    foreign_acl = Acl("User:other", "ALLOW", "ALTER", "cluster", "kafka-cluster", "literal")
    stage.cluster.create_acl(foreign_acl)
    assert stage.apply(spec, prune=True).acts == ()
    assert foreign_acl in stage.cluster.acls
    told = (
        "extra ACL: allow User:other ALTER on cluster (not removed by draftloop, it is on more than its topics:"
        " remove it, or add the user to `admins`)"
    )
    assert stage.plan(spec).text() == told
    assert not stage.plan(spec).in_sync
    assert stage.plan(spec_of(admins=["admin", "other"])).in_sync


def test_the_administrator_itself_is_never_extra(stage: Stage) -> None:
    spec = spec_of(admins=[])
    stage.apply(spec)
    stage.cluster.create_acl(Acl("User:admin", "ALLOW", "ALL", "cluster", "kafka-cluster", "literal"))
    assert stage.plan(spec).in_sync


def test_an_acl_that_fails_is_named_and_the_next_apply_goes_on_from_there(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of()
    create = stage.cluster.create_acl

    def refuse(acl: Acl) -> None:
        if acl == MISSING:
            raise AccessDeniedError("admin may not add it")
        create(acl)

    with monkeypatch.context() as patched:
        patched.setattr(stage.cluster, "create_acl", refuse)
        with pytest.raises(AccessDeniedError) as failed:
            stage.apply(spec)
    assert failed.value.message == (
        "add allow User:draftloop-reader READ on topic draftloop.raw.m: admin may not add it"
        " (7 acts before it are done)"
    )
    assert stage.audit.records[-1].outcome == "failed"
    assert stage.plan(spec).to_do == ["add allow User:draftloop-reader READ on topic draftloop.raw.m"]
    assert len(stage.apply(spec).acts) == 1


def test_nothing_is_done_when_something_is_impossible_and_each_thing_has_its_line(stage: Stage) -> None:
    stage.apply(spec_of())
    topics = [{"name": "draftloop.raw.{target}", "partitions": 1, "retention": "1h"}]
    with pytest.raises(ConfigError) as refused:
        stage.apply(spec_of(topics=topics, replication=3))
    assert refused.value.message.splitlines() == [
        "the access file asks for what cannot be done:",
        "  topic draftloop.raw.m has 1 copy, the file says 3: write 1, or move its partitions with Kafka's"
        " kafka-reassign-partitions first",
        "  topic draftloop.raw.m has 2 partitions, the file says 1: partitions can only grow; write 2, or make a"
        " topic of another name",
    ]
    assert difference(spec_of(), stage.cluster.state("draftloop.")).in_sync


def test_every_act_is_recorded_before_and_after_and_the_audit_topic_comes_first(stage: Stage) -> None:
    told: list[str] = []
    applied = stage.apply(spec_of(), on_act=told.append)
    assert tuple(told) == applied.acts
    assert applied.acts[0] == f"create topic {AUDIT_TOPIC}"
    records = [(record.details["what"], record.outcome) for record in stage.audit.records]
    assert records == [(act, outcome) for act in applied.acts for outcome in ("begun", "done")]
    assert {(record.act, record.by) for record in stage.audit.records} == {("access.change", "admin")}
    assert not any(password in repr(stage.audit.records) for password in stage.cluster.passwords.values())


def test_rights_are_given_after_what_they_are_rights_on(stage: Stage) -> None:
    acts = stage.apply(load_spec(None)).acts
    kinds = [act.split()[0] + " " + act.split()[1] for act in acts]
    order = [kinds.index(kind) for kind in ("create topic", "create user", "write client", "add allow")]
    assert order == sorted(order)
    assert kinds.index("add allow") > max(index for index, kind in enumerate(kinds) if kind == "create topic")


# --- other ways to keep secrets and to log in ---


def test_a_secret_command_gets_the_password_on_its_stdin_and_nobody_else_sees_it(
    stage: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    program = (
        "import sys, pathlib; word = sys.stdin.read(); print(word); print(word, file=sys.stderr);"
        f"lines = pathlib.Path('/proc/self/cmdline').read_bytes(); folder = pathlib.Path({str(kept)!r});"
        "(folder / sys.argv[1]).write_text(word); (folder / (sys.argv[1] + '.cmdline')).write_bytes(lines);"
        "(folder / (sys.argv[1] + '.environ')).write_bytes(pathlib.Path('/proc/self/environ').read_bytes())"
    )
    spec = spec_of(secrets={"command": [sys.executable, "-c", program, "{principal}"]})
    applied = stage.apply(spec)
    passwords = dict(stage.cluster.passwords)
    told = "".join(capfd.readouterr()) + applied.text() + repr(stage.audit.records)
    for name, password in passwords.items():
        assert (kept / name).read_text() == password
        assert password not in told
        for seen in ("cmdline", "environ"):
            assert password.encode() not in (kept / f"{name}.{seen}").read_bytes()
    assert not (stage.home / "secrets").exists()
    assert stage.apply(spec).acts == ()
    security = stage.client("draftloop-hook").security
    assert security is not None
    assert security.password_env == "DRAFTLOOP_HOOK_PASSWORD"


@pytest.mark.parametrize(
    "command",
    [
        ["/nonexistent", "{principal}"],
        [sys.executable, "-c", "import sys; print(sys.stdin.read()); raise SystemExit(sys.stdin)", "{principal}"],
    ],
)
def test_a_secret_command_that_fails_leaves_the_user_as_it_was_and_its_output_untold(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setattr(access.random_secrets, "token_urlsafe", lambda _: "canary-password")
    with pytest.raises(StorageError, match="did not take the password of draftloop-hook") as failed:
        stage.apply(spec_of(secrets={"command": command}))
    assert stage.cluster.passwords == {}
    assert "canary" not in str(failed.value) + repr(stage.audit.records) + "".join(capfd.readouterr())


def test_principals_with_certificates_or_tokens_get_no_password(tmp_path: Path) -> None:
    spec = spec_of(
        mtls_bootstrap=["127.0.0.1:8"],
        principals=[
            {"name": "draftloop-hook", "auth": "mtls"},
            {"name": "draftloop-agent", "auth": "oauth", "token_command": ["token"]},
        ],
    )
    stage = Stage(tmp_path)
    tls = tmp_path / "tls"
    with pytest.raises(ConfigError, match="have your CA issue one with CN=draftloop-hook"):
        stage.apply(spec)
    tls.mkdir()
    for name in ("draftloop-hook.pem", "draftloop-hook.key"):
        (tls / name).write_text("x")
    stage.apply(spec)
    assert stage.cluster.passwords == {}
    assert stage.plan(spec).in_sync
    hook, agent = stage.client("draftloop-hook"), stage.client("draftloop-agent")
    assert hook.bootstrap == ("127.0.0.1:8",)
    assert hook.security == KafkaSecurity(
        protocol="SSL",
        ca_file=Path("/ca.pem"),
        cert_file=tls / "draftloop-hook.pem",
        key_file=tls / "draftloop-hook.key",
    )
    assert agent.security == KafkaSecurity(mechanism="OAUTHBEARER", token_command=("token",), ca_file=Path("/ca.pem"))


def test_a_folder_that_cannot_be_written_keeps_the_users_password(stage: Stage) -> None:
    if os.geteuid() == 0:
        (stage.home / "secrets").write_text("a file where the folder should be")
    else:
        (stage.home / "secrets").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="the password of draftloop-hook cannot be kept"):
        stage.apply(spec_of())
    assert stage.cluster.passwords == {}


def test_a_secrets_folder_of_ones_own_is_used(stage: Stage, tmp_path: Path) -> None:
    spec = spec_of(secrets={"folder": str(tmp_path / "vault")})
    assert isinstance(open_secrets(spec, stage.home, admin_config()), SecretFolder)
    stage.apply(spec)
    assert {file.name for file in (tmp_path / "vault").iterdir()} == {
        "draftloop-hook.password",
        "draftloop-reader.password",
    }
    assert not stage.verify(spec).surprises


# --- verify ---


def test_verify_tries_every_cell_and_finds_no_surprise_after_apply(stage: Stage) -> None:
    spec = load_spec(None)
    stage.apply(spec)
    told: list[str] = []
    matrix = access.verify(spec, stage.client, told.append, connect=stage.cluster.connect)
    assert len(matrix.cells) == 6 * (7 * 8 + 2 * 3 + 5)
    assert len({cell[:3] for cell in matrix.cells}) == len(matrix.cells)
    assert matrix.surprises == ()
    matrix.check()
    assert len(told) == 6
    assert set(matrix.to_dict()["cells"][0]) == {"principal", "operation", "topic", "expected", "observed"}
    assert matrix.text().splitlines()[-1] == "402 cells tried, 0 surprises"


def cells(matrix: access.Matrix) -> list[Cell]:
    """The surprises that are cells."""
    return [one for one in matrix.surprises if isinstance(one, Cell)]


def test_a_right_too_many_and_one_too_few_are_named_cell_by_cell(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    stage.cluster.create_acl(Acl("User:draftloop-hook", "ALLOW", "READ", "topic", "draftloop.raw.", "prefixed"))
    stage.cluster.delete_acl(MISSING)
    matrix = stage.verify(spec)
    assert [(one.principal, one.operation, one.topic, one.observed) for one in cells(matrix)] == [
        ("draftloop-hook", "READ", "draftloop.raw.m", "allowed"),
        ("draftloop-reader", "READ", "draftloop.raw.m", "denied"),
        ("draftloop-reader", "DESCRIBE", "draftloop.raw.m", "denied"),
    ]
    assert [one.kind for one in matrix.surprises if isinstance(one, Finding)] == ["extra_acl"]
    with pytest.raises(AccessSurpriseError) as surprise:
        matrix.check()
    assert "draftloop-hook READ draftloop.raw.m: expected denied, observed allowed" in surprise.value.message
    assert "draftloop-reader READ draftloop.raw.m: expected allowed, observed denied" in surprise.value.message


def test_a_principal_that_cannot_log_in_is_one_surprise_with_its_own_mend(stage: Stage) -> None:
    spec = spec_of(principals=[*small()["principals"], {"name": "draftloop-third"}])
    stage.apply(spec)
    stage.cluster.passwords["draftloop-hook"] = "another"
    (stage.home / "clients" / "draftloop-reader.toml").unlink()
    stage.password_file("draftloop-third").unlink()
    matrix = stage.verify(spec)
    assert {(cell.principal, cell.observed) for cell in matrix.cells} == {
        ("draftloop-hook", "error: AuthenticationError"),
        ("draftloop-reader", "error: ConfigError"),
        ("draftloop-third", "error: ConfigError"),
    }
    rotate = "`draftloop access apply --home HOME --access FILE --rotate"
    third = stage.password_file("draftloop-third")
    client = stage.home / "clients" / "draftloop-reader.toml"
    found = [(one.what, one.mend) for one in matrix.surprises if isinstance(one, Finding)]
    assert found[1][0].startswith("draftloop-reader cannot log in: ConfigError: ")
    assert str(client) in found[1][0]
    assert found == [
        (
            "draftloop-hook cannot log in: AuthenticationError: the cluster refuses draftloop-hook",
            f"put the right password into {stage.password_file('draftloop-hook')}, or {rotate} draftloop-hook` gives"
            " draftloop-hook a new password",
        ),
        (
            found[1][0],
            "`draftloop access apply --home HOME --access FILE` writes the client file of draftloop-reader",
        ),
        (
            f"draftloop-third cannot log in: ConfigError: secret file {third} cannot be read: FileNotFoundError",
            f"put the right password into {third}, or {rotate} draftloop-third` gives draftloop-third a new password",
        ),
    ]
    assert len(matrix.surprises) == 3
    assert matrix.text().splitlines()[:3] == [
        f"draftloop-{name}: cannot log in, nothing tried" for name in ("hook", "reader", "third")
    ]
    assert len(matrix.text().splitlines()) == 3 + 3 + 1
    with pytest.raises(AccessSurpriseError, match="3 surprises") as surprise:
        matrix.check()
    assert surprise.value.mend == "\n        ".join(one.mend for one in matrix.surprises if isinstance(one, Finding))


def test_a_missing_topic_is_a_surprise(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)
    del stage.cluster.topics["draftloop.raw.m"]
    assert {cell.observed for cell in cells(stage.verify(spec))} == {"error: UnknownTopicOrPartitionError"}


def test_no_broker_at_all_is_one_error_not_a_matrix_of_them(stage: Stage) -> None:
    spec = spec_of()
    stage.apply(spec)

    def connect(config: KafkaConfig) -> Any:
        raise BrokerUnreachableError("nothing answers")

    with pytest.raises(BrokerUnreachableError):
        access.verify(spec, stage.client, connect=connect)


# --- verify: what no principal's own tries show ---

RAW_ACL = ("topic", "draftloop.raw.m", "literal")


@pytest.mark.parametrize(
    ("acl", "cell"),
    [
        (Acl("User:spy", "ALLOW", "READ", *RAW_ACL), ("spy", "READ", "draftloop.raw.m")),
        (Acl("User:spy", "ALLOW", "READ", "topic", "draft", "prefixed"), ("spy", "READ", "draftloop.raw.m")),
        (Acl("User:spy", "ALLOW", "READ", "topic", "draftloop.raw.", "prefixed"), ("spy", "READ", "draftloop.raw.m")),
        (Acl("User:spy", "ALLOW", "READ", "topic", "*", "literal"), ("spy", "READ", "draftloop.audit")),
        (Acl("User:spy", "ALLOW", "ALL", *RAW_ACL, "10.0.0.1"), ("spy", "DELETE", "draftloop.raw.m")),
        (Acl("User:spy", "ALLOW", "READ", "topic", "draftloop.x", "literal"), ("spy", "READ", "draftloop.x")),
        (Acl("User:spy", "ALLOW", "READ", "topic", "draftloop.x.", "prefixed"), ("spy", "READ", "draftloop.x.*")),
        (Acl("User:ANONYMOUS", "ALLOW", "WRITE", *RAW_ACL), ("ANONYMOUS", "WRITE", "draftloop.raw.m")),
        (Acl("User:*", "ALLOW", "DESCRIBE", *RAW_ACL), ("*", "DESCRIBE", "draftloop.raw.m")),
        (Acl("User:draftloop-gone", "ALLOW", "READ", *RAW_ACL), ("draftloop-gone", "READ", "draftloop.raw.m")),
        (Acl("User:spy", "ALLOW", "READ", "group", "*", "literal"), ("spy", "READ", "group:draftloop.g")),
        (Acl("User:spy", "ALLOW", "READ", "group", "draftloop.", "prefixed"), ("spy", "READ", "group:draftloop.g")),
        (Acl("User:spy", "ALLOW", "DELETE", "group", "outside.g", "literal"), ("spy", "DELETE", "group:outside.g")),
        (Acl("User:spy", "ALLOW", "ALTER", "cluster", "kafka-cluster", "literal"), ("spy", "ALTER", "cluster")),
        (Acl("User:spy", "ALLOW", "CLUSTER_ACTION", "cluster", "kafka-cluster", "literal"),
         ("spy", "CLUSTER_ACTION", "cluster")),
        (Acl("User:spy", "ALLOW", "CREATE_TOKENS", "user", "User:draftloop-hook", "literal"),
         ("spy", "CREATE_TOKENS", "user:User:draftloop-hook")),
        (Acl("User:spy", "ALLOW", "DESCRIBE", "delegation_token", "t", "literal"),
         ("spy", "DESCRIBE", "delegation_token:t")),
    ],
)  # fmt: skip
def test_a_right_of_anybody_outside_the_file_fails_verify(stage: Stage, acl: Acl, cell: tuple[str, str, str]) -> None:
    grants = [
        {"allow": ["READ"], "group": "draftloop.g"},
        {"allow": ["READ"], "group": "outside.g"},
    ]
    spec = spec_of(principals=[{"name": "draftloop-reader", "acls": grants}])
    stage.apply(spec)
    stage.verify(spec).check()
    stage.cluster.create_acl(acl)
    matrix = stage.verify(spec)
    assert Cell(*cell, "denied", "allowed") in matrix.foreign
    (found,) = [one for one in matrix.surprises if isinstance(one, Finding)]
    assert (found.kind, found.what) == ("extra_acl", f"extra ACL that the access file does not have: {acl.text()}")
    with pytest.raises(AccessSurpriseError) as surprise:
        matrix.check()
    assert acl.text() in surprise.value.message
    told = matrix.to_dict()
    assert (
        dict(zip(("principal", "operation", "topic"), cell, strict=True), expected="denied", observed="allowed")
        in (told["cells"])
    )
    assert all(set(one) == {"principal", "operation", "topic", "expected", "observed"} for one in told["cells"])
    assert {"kind": "extra_acl", "what": found.what, "mend": found.mend} in told["surprises"]
    assert f"SURPRISE {found.what}" in matrix.text().splitlines()


@pytest.mark.parametrize(
    ("damage", "kind", "told"),
    [
        (
            foreign(Acl("User:draftloop-hook", "DENY", "WRITE", "topic", "draftloop.other", "literal")),
            "denying_acl",
            "denying ACL that the access file does not have: deny User:draftloop-hook WRITE on topic draftloop.other",
        ),
        (
            foreign(Acl("User:*", "DENY", "ALL", "topic", "draftloop.other", "literal")),
            "denying_acl",
            "denying ACL that the access file does not have: deny User:* ALL on topic draftloop.other",
        ),
        (
            lambda s: s.cluster.set_password("draftloop-old", "x"),
            "extra_user",
            "user draftloop-old that the access file does not have",
        ),
        (
            set_config("retention.ms", "-1"),
            "drift",
            "changed since it was applied: topic draftloop.raw.m: retention.ms -1 -> 259200000",
        ),
        (
            set_config("message.timestamp.type", "LogAppendTime"),
            "drift",
            "changed since it was applied: topic draftloop.raw.m: message.timestamp.type LogAppendTime -> CreateTime",
        ),
        (
            change_topic(replication=3),
            "drift",
            "topic draftloop.raw.m has 3 copies, the file says 1: write 3, or move its partitions with Kafka's"
            " kafka-reassign-partitions first",
        ),
        (
            lambda s: s.cluster.set_quota("draftloop-hook", {"producer_byte_rate": 1.0}),
            "drift",
            "changed since it was applied: draftloop-hook: producer_byte_rate 1 -> not set",
        ),
    ],
)
def test_what_the_file_does_not_say_fails_verify(
    stage: Stage, damage: Callable[[Stage], Any], kind: str, told: str
) -> None:
    spec = spec_of()
    stage.apply(spec)
    damage(stage)
    matrix = stage.verify(spec)
    assert [(one.kind, one.what) for one in matrix.surprises if isinstance(one, Finding)] == [(kind, told)]
    with pytest.raises(AccessSurpriseError, match="1 surprise:"):
        matrix.check()


def test_rights_of_admins_and_of_others_elsewhere_and_extra_topics_do_not_fail_verify(stage: Stage) -> None:
    spec = spec_of(admins=["admin", "ops"])
    stage.apply(spec)
    for acl in (
        Acl("User:ops", "ALLOW", "ALL", "topic", "*", "literal"),
        Acl("User:other", "ALLOW", "ALL", "topic", "elsewhere.", "prefixed"),
        Acl("User:spy", "DENY", "ALL", *RAW_ACL),
    ):
        stage.cluster.create_acl(acl)
    stage.cluster.create_topic("draftloop.old", TopicState(1, 1, {}))
    matrix = stage.verify(spec)
    matrix.check()
    assert matrix.to_dict()["surprises"] == []
    assert "note: extra topic draftloop.old, which the access file does not know" in matrix.text().splitlines()

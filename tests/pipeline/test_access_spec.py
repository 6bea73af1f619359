"""The access file: what a sound one gives, what is refused; and the rules of ACLs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import PRINCIPALS, small, spec_of

from draftloop.pipeline.config import Config
from draftloop.pipeline.errors import ConfigError
from draftloop.pipeline.stream.access_rules import Acl, allows
from draftloop.pipeline.stream.access_spec import TopicState, load_spec, parse_spec
from draftloop.pipeline.stream.topics import slug
from draftloop.pipeline.workspace import Workspace


def with_topic(**changes: Any) -> dict[str, Any]:
    return small(topics=[{"name": "draftloop.raw.{target}", "partitions": 2, "retention": "72h", **changes}])


def with_grant(**grant: Any) -> dict[str, Any]:
    return small(principals=[{"name": "draftloop-hook", "acls": [grant]}])


# --- the access file ---


def test_the_packaged_file_has_the_six_principals_and_seven_topics_of_the_design() -> None:
    spec = load_spec(None)
    assert {principal.name for principal in spec.principals} == {f"draftloop-{name}" for name in PRINCIPALS}
    assert set(spec.topic_states()) == {
        "draftloop.raw.smollm2",
        "draftloop.curated.smollm2",
        "draftloop.stats.smollm2",
        "draftloop.consent",
        "draftloop.erasure",
        "draftloop.audit",
        "draftloop.dlq.smollm2",
    }
    assert all(acl.name != "*" and (acl.pattern == "literal" or acl.name.endswith(".")) for acl in spec.acls())


@pytest.mark.parametrize(
    ("principal", "operation", "topic", "allowed"),
    [
        ("hook", "WRITE", "draftloop.raw.smollm2", True),
        ("hook", "READ", "draftloop.raw.smollm2", False),
        ("hook", "WRITE", "draftloop.curated.smollm2", False),
        ("curator", "READ", "draftloop.raw.smollm2", True),
        ("curator", "WRITE", "draftloop.audit", True),
        ("curator", "WRITE", "draftloop.dlq.smollm2", True),
        ("trainer", "READ", "draftloop.raw.smollm2", False),
        ("trainer", "READ", "draftloop.curated.smollm2", True),
        ("trainer", "WRITE", "draftloop.audit", True),
        ("trainer", "READ", "draftloop.audit", False),
        ("agent", "WRITE", "draftloop.audit", True),
        ("officer", "WRITE", "draftloop.erasure", True),
        ("officer", "READ", "draftloop.raw.smollm2", False),
        ("auditor", "READ", "draftloop.audit", True),
        ("auditor", "READ", "draftloop.curated.smollm2", False),
        ("auditor", "DESCRIBE", "draftloop.raw.smollm2", True),
    ],
)
def test_the_packaged_rights_are_those_of_the_design(principal: str, operation: str, topic: str, allowed: bool) -> None:
    assert allows(load_spec(None).acls(), f"draftloop-{principal}", operation, "topic", topic) is allowed


def test_settings_are_pinned_as_kafka_spells_them() -> None:
    topic = spec_of().topic_states()["draftloop.raw.m"]
    assert topic == TopicState(
        2,
        1,
        {
            "cleanup.policy": "delete",
            "retention.ms": str(72 * 3_600_000),
            "segment.ms": str(6 * 3_600_000),
            "max.message.bytes": "1048588",
            "min.insync.replicas": "1",
            "message.timestamp.type": "CreateTime",
            "message.timestamp.after.max.ms": "3600000",
        },
    )


def test_a_template_gives_a_topic_and_a_literal_acl_for_each_target() -> None:
    spec = spec_of(targets=["a", "ab"])
    assert set(spec.topic_states()) == {"draftloop.raw.a", "draftloop.raw.ab", "draftloop.audit"}
    assert Acl("User:draftloop-reader", "ALLOW", "READ", "topic", "draftloop.raw.a", "literal") in spec.acls()
    assert Acl("User:draftloop-reader", "ALLOW", "READ", "topic", "draftloop.raw.ab", "literal") in spec.acls()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (small(password="hunter2"), "password"),
        (small(targets=[]), "targets"),
        (small(targets=["a.b"]), "target 'a.b'"),
        (small(targets=["m", "m"]), "target 'm' stands twice"),
        (small(topic_prefix="draftloop"), "topic_prefix 'draftloop' must end with '.'"),
        (small(min_insync_replicas=2), "min_insync_replicas is over replication 1"),
        (with_topic(retention="3 days"), "retention: a duration is a number and s, m, h or d"),
        (with_topic(retention=72), "topic 'draftloop.raw.{target}': retention: a duration"),
        (with_topic(partitions=0), "topic 'draftloop.raw.{target}': partitions: "),
        (with_topic(cleanup="shred"), "topic 'draftloop.raw.{target}': cleanup: "),
        (with_topic(cleanup="compact"), "cleanup compact has none"),
        (with_topic(max_ahead="forever"), "max_ahead"),
        (with_topic(name="draftloop.raw{target}"), "must be one whole part between dots"),
        (with_topic(name="draftloop.raw.*"), "topic 'draftloop.raw.*'"),
        (with_topic(name="other.raw"), "does not begin with topic_prefix 'draftloop.'"),
        (with_topic(configs={"retention.ms": "1"}), "retention.ms has a key of its own"),
        (with_topic(extra=1), "topic 'draftloop.raw.{target}': unknown key 'extra'"),
        (with_grant(allow=["READ"]), "exactly one of topic"),
        (with_grant(allow=["READ"], topic="draftloop.audit", cluster=True), "exactly one of topic"),
        (with_grant(allow=[], topic="draftloop.audit"), "allow"),
        (with_grant(allow=["ALL"], topic="draftloop.audit"), "'ALL' is no operation on a topic"),
        (with_grant(allow=["WRITE"], group="draftloop.g"), "'WRITE' is no operation on a group"),
        (with_grant(allow=["READ"], topic="*"), "no wildcards"),
        (with_grant(allow=["READ"], group="*"), "no wildcards"),
        (with_grant(allow=["READ"], topic_prefix="draftloop.raw.m"), "must end with '.'"),
        (with_grant(allow=["READ"], group_prefix="draftloop"), "must end with '.'"),
        (with_grant(allow=["READ"], topic="draftloop.typo"), "fits no topic of this file"),
        (with_grant(allow=["READ"], topic_prefix="draftloop.typo."), "fits no topic of this file"),
        (small(principals=[{"name": "draftloop-a,b"}]), "principal 'draftloop-a,b'"),
        (small(principals=[{"name": "draftloop-a=b"}]), "principal 'draftloop-a=b'"),
        (small(principals=[{"name": "draftloop-*"}]), "principal 'draftloop-*'"),
        (small(principals=[{"name": "somebody"}]), "does not begin with 'draftloop-'"),
        (small(principals=[{"name": "draftloop-a"}, {"name": "draftloop-a"}]), "'draftloop-a' stands twice"),
        (small(principals=[{"name": "draftloop-a", "auth": "oauth"}]), "token_command go together"),
        (small(principals=[{"name": "draftloop-a"}], admins=["draftloop-a"]), "is an admin too"),
        (small(secrets={"command": ["keep"]}), "must hold {principal}"),
        (small(secrets={"command": ["keep", "{principal}"], "folder": "/x"}), "not to both"),
    ],
)
def test_a_bad_access_file_is_refused_naming_what_is_wrong(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_spec(values, "mine.toml")
    assert named in refused.value.message
    assert "mine.toml" in refused.value.message
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message", "mend"),
    [
        (
            small(principals=[{"name": "draftloop-hook", "acls": [{"alow": ["READ"], "topic": "draftloop.audit"}]}]),
            "principal 'draftloop-hook': ACL 1 of 1: unknown key 'alow', did you mean 'allow'?",
            "known keys in acls: allow, topic, topic_prefix, group, group_prefix, cluster",
        ),
        (
            small(topics=[{"name": "draftloop.raw.{target}", "partions": 1, "retention": "1h"}]),
            "topic 'draftloop.raw.{target}': unknown key 'partions', did you mean 'partitions'?",
            "known keys in topics: name, partitions, replication, min_insync_replicas, cleanup, retention, segment,"
            " max_message_bytes, max_ahead, configs",
        ),
        (
            small(topics=[{"nam": "draftloop.raw.x", "partitions": 1, "retention": "1h"}]),
            "topic 1 of 1: unknown key 'nam', did you mean 'name'?",
            None,
        ),
        (small(target=["m"]), "unknown key 'target', did you mean 'targets'?", "known keys: targets, topic_prefix,"),
        (
            small(targts=1, principals=[{"name": "draftloop-a", "quota": {"rate": 1}}]),
            "principal 'draftloop-a': quota: unknown key 'rate'; unknown key 'targts', did you mean 'targets'?",
            "known keys in quota: producer_byte_rate, consumer_byte_rate; known keys: targets,",
        ),
        (
            small(topics=[{"name": "draftloop.raw.{target}", "retention": "1h"}]),
            "topic 'draftloop.raw.{target}': 'partitions' is missing",
            None,
        ),
        (
            small(principals=[{"name": "draftloop-a"}, {"name": "draftloop-b", "acls": [{"allow": ["READ"]}]}]),
            "principal 'draftloop-b': ACL 1 of 1: an ACL names exactly one of topic, topic_prefix, group, group_prefix"
            " and cluster = true",
            "`draftloop access example` prints a file that works, with every key explained",
        ),
        (
            with_topic(cleanup="compact"),
            "topic 'draftloop.raw.{target}': cleanup delete needs retention, cleanup",
            None,
        ),
        (small(topics="many"), "topics: ", None),
        (small(targets=["My_Llama.8B"]), "target 'My_Llama.8B': lower-case letters, digits and '-' only", None),
    ],
)
def test_a_slip_is_told_by_the_names_in_the_file_the_misspelt_key_first(
    values: dict[str, Any], message: str, mend: str | None
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_spec(values, "mine.toml")
    assert refused.value.message.removeprefix("access file mine.toml: ").removeprefix("targets: ").startswith(message)
    assert mend is None or (refused.value.mend or "").startswith(mend)


@given(st.text())
def test_a_target_that_is_refused_is_told_the_form_the_work_folder_gives_it(name: str) -> None:
    given_name = f"/models/{name.replace('/', '')}x"
    wanted = Workspace(Config.model_validate({"target": {"path": given_name}})).slug()
    target = Path(given_name).name
    if target == wanted:
        assert parse_spec(small(targets=[target]), "test").targets == (target,)
        return
    with pytest.raises(ConfigError) as refused:
        parse_spec(small(targets=[target]), "test")
    assert refused.value.mend == f"write {wanted!r}"
    assert slug(wanted) == wanted


@pytest.mark.parametrize(
    "names",
    [
        ("draftloop.raw.{target}", "draftloop.raw.other"),
        ("draftloop.raw.{target}", "draftloop.raw.{target}"),
        ("draftloop.{target}.x", "draftloop.raw.{target}"),
        ("draftloop.a_b", "draftloop.a.b"),
    ],
)
def test_topics_whose_names_could_collide_are_refused(names: tuple[str, str]) -> None:
    topics = [{"name": name, "partitions": 1, "retention": "1h"} for name in names]
    with pytest.raises(ConfigError, match="collide"):
        parse_spec(small(topics=topics, principals=[{"name": "draftloop-a"}]), "test")


def test_a_tenants_own_topic_may_stand_under_its_target() -> None:
    topics = [
        {"name": f"draftloop.raw.{tail}", "partitions": 1, "retention": "1h"}
        for tail in ("{target}", "{target}.t.acme")
    ]
    spec = parse_spec(small(topics=topics), "test")
    assert set(spec.topic_states()) == {"draftloop.raw.m", "draftloop.raw.m.t.acme"}


@pytest.mark.parametrize("content", [b"targets = [", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "access.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"access\.toml"):
        load_spec(file)
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        load_spec(tmp_path / "nowhere.toml")


# --- rules ---


def rule(operation: str, name: str, *, permission: str = "ALLOW", pattern: str = "literal", who: str = "User:a") -> Acl:
    return Acl(who, permission, operation, "topic", name, pattern)


@pytest.mark.parametrize(
    ("acls", "operation", "expected"),
    [
        ([], "READ", False),
        ([rule("READ", "t.x")], "READ", True),
        ([rule("READ", "t.x")], "DESCRIBE", True),
        ([rule("WRITE", "t.x")], "DESCRIBE", True),
        ([rule("CREATE", "t.x")], "DESCRIBE", False),
        ([rule("DESCRIBE", "t.x")], "READ", False),
        ([rule("ALTER_CONFIGS", "t.x")], "DESCRIBE_CONFIGS", True),
        ([rule("DESCRIBE_CONFIGS", "t.x")], "ALTER_CONFIGS", False),
        ([rule("ALL", "t.x")], "DELETE", True),
        ([rule("READ", "t.", pattern="prefixed")], "READ", True),
        ([rule("READ", "t.xy", pattern="prefixed")], "READ", False),
        ([rule("READ", "t.")], "READ", False),
        ([rule("READ", "*")], "READ", True),
        ([rule("READ", "t.x", who="User:*")], "READ", True),
        ([rule("READ", "t.x", who="User:b")], "READ", False),
        ([rule("READ", "t.x"), rule("READ", "t.", permission="DENY", pattern="prefixed")], "READ", False),
        ([rule("READ", "t.x"), rule("WRITE", "t.x", permission="DENY")], "READ", True),
        ([rule("READ", "t.x"), rule("ALL", "t.x", permission="DENY")], "READ", False),
    ],
)
def test_rules_are_judged_as_kafka_judges_them(acls: list[Acl], operation: str, expected: bool) -> None:
    assert allows(acls, "a", operation, "topic", "t.x") is expected

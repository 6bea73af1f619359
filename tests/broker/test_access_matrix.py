"""Access on a real Kafka: what apply makes, what verify sees, and that trying leaves no trace."""

from __future__ import annotations

import shutil
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftloop.pipeline.errors import (
    AccessDeniedError,
    AccessSurpriseError,
    AuthenticationError,
    BrokerError,
    ConfigError,
    MissingTopicError,
)
from draftloop.pipeline.stream import access
from draftloop.pipeline.stream.access_plan import ClusterState
from draftloop.pipeline.stream.access_rules import (
    CLUSTER_OPERATIONS,
    GROUP_OPERATIONS,
    TOPIC_OPERATIONS,
    Acl,
    Cell,
    Finding,
)
from draftloop.pipeline.stream.access_secrets import open_secrets
from draftloop.pipeline.stream.access_spec import DEFAULT_FILE, AccessSpec, TopicState, load_spec, parse_spec
from draftloop.pipeline.stream.audit import AUDIT_TOPIC, LogAudit, MemoryAudit, read_audit
from draftloop.pipeline.stream.broker import LocalBroker
from draftloop.pipeline.stream.kafka_config import KafkaConfig, read_client
from draftloop.pipeline.stream.log import LogEntry

RAW, CONSENT = "acc.raw.smollm2", "acc.consent"
VERIFY_WITHIN_S = 60.0


def packaged(**changes: Any) -> AccessSpec:
    """The packaged file under names of this module's own."""
    text = DEFAULT_FILE.read_text().replace("draftloop.", "acc.").replace("draftloop-", "acc-")
    admins = ["admin", "draftloop-auditor"]  # the session's own access lets the auditor DESCRIBE the cluster
    return parse_spec({**tomllib.loads(text), "admins": admins, **changes}, "packaged")


@dataclass
class Place:
    """A home with its principals on the session's broker."""

    home: Path
    admin: KafkaConfig
    cluster: Any
    spec: AccessSpec

    def apply(self, spec: AccessSpec | None = None, **options: Any) -> access.Applied:
        spec = spec or self.spec
        return access.apply(spec, self.cluster, open_secrets(spec, self.home, self.admin), MemoryAudit(), **options)

    def plan(self, spec: AccessSpec | None = None) -> access.Plan:
        spec = spec or self.spec
        return access.plan(spec, self.cluster, open_secrets(spec, self.home, self.admin))

    def verify(self, spec: AccessSpec | None = None) -> access.Matrix:
        return access.verify(spec or self.spec, self.client, cluster=self.cluster)

    def client(self, principal: str) -> KafkaConfig:
        return read_client(self.home / "clients" / f"{principal}.toml")

    def state(self) -> ClusterState:
        found: ClusterState = self.cluster.state(self.spec.topic_prefix)
        return found

    def password_file(self, principal: str) -> Path:
        return self.home / "secrets" / f"{principal}.password"


@pytest.fixture(scope="module")
def applied(admin: KafkaConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    from draftloop.pipeline.stream.kafka_admin import KafkaAdmin

    with KafkaAdmin(admin) as cluster:
        place = Place(tmp_path_factory.mktemp("access"), admin, cluster, packaged())
        place.apply()
        yield place


@pytest.fixture
def place(applied: Place) -> Iterator[Place]:
    """The cluster as the packaged file says, whatever the test before did."""
    yield applied
    for acl in applied.plan().extra_acls:
        applied.cluster.delete_acl(acl)
    applied.apply(prune=True)


def eventually(is_so: Callable[[], bool], *, within_s: float = 10.0) -> None:
    """Rights and passwords reach the broker a moment after the controller took them."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def offsets(config: KafkaConfig, topics: list[str]) -> dict[str, tuple[dict[int, int], dict[int, int]]]:
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    log = KafkaLog(config)
    try:
        return {topic: (log.start_offsets(topic), log.end_offsets(topic)) for topic in topics}
    finally:
        log.close()


def write(config: KafkaConfig, topic: str, count: int = 1) -> None:
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    log = KafkaLog(config)
    try:
        log.append(topic, [LogEntry(b"key", b"%d" % number) for number in range(count)])
    finally:
        log.close()


def read(config: KafkaConfig, topic: str) -> int:
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    log = KafkaLog(config)
    try:
        ends = log.end_offsets(topic)
        starts = log.start_offsets(topic)
        return sum(1 for part, end in ends.items() for _ in log.read(topic, part, starts[part], end))
    finally:
        log.close()


def admitted(config: KafkaConfig) -> bool:
    from draftloop.pipeline.stream.kafka_connect import probe

    try:
        probe(config)
    except AuthenticationError:
        return False
    return True


# --- the whole matrix ---


def test_every_act_of_every_principal_is_tried_and_goes_as_the_file_says(place: Place) -> None:
    begun = time.monotonic()
    matrix = place.verify()
    assert time.monotonic() - begun < VERIFY_WITHIN_S
    assert matrix.surprises == ()
    assert len(matrix.cells) == 402
    tried = {(cell.principal, cell.operation, cell.topic) for cell in matrix.cells}
    assert tried >= {
        (principal.name, operation, topic)
        for principal in place.spec.principals
        for topic in place.spec.topic_states()
        for operation in ("READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS")
    }
    assert {cell.observed for cell in matrix.cells} == {"allowed", "denied"}
    curator = {(cell.operation, cell.topic): cell.observed for cell in matrix.cells if cell.principal == "acc-curator"}
    assert curator["READ", "group:acc.curator.access-verify"] == "allowed"
    assert curator["READ", "group:access-verify.foreign"] == "denied"
    assert all(c.observed == "denied" for c in matrix.cells if c.topic == "cluster" and c.operation == "ALTER")


def test_trying_leaves_no_trace_even_with_every_right_there_is(place: Place) -> None:
    topics = list(place.spec.topic_states())
    write(place.client("acc-hook"), RAW, 40)
    mighty = packaged(
        principals=[
            {
                "name": "acc-mighty",
                "acls": [
                    {"allow": list(TOPIC_OPERATIONS), "topic_prefix": "acc."},
                    {"allow": list(GROUP_OPERATIONS), "group_prefix": "acc."},
                    {"allow": list(GROUP_OPERATIONS), "group": "acc-literal"},
                    {"allow": list(CLUSTER_OPERATIONS), "cluster": True},
                ],
            }
        ]
    )
    place.apply(mighty)
    try:
        state, before = place.state(), offsets(place.admin, topics)
        matrix = access.verify(mighty, place.client)  # the packaged file's principals are there, and extra
        assert matrix.surprises == ()
        denied = {cell.topic for cell in matrix.cells if cell.observed == "denied"}
        assert denied == {"group:access-verify.foreign"}
        assert offsets(place.admin, topics) == before
        assert sum(sum(ends.values()) for _, ends in before.values()) >= 40
        assert place.state() == state
        assert groups(place) == []
    finally:
        place.apply(prune=True)
        assert "acc-mighty" not in place.state().users
        for file in place.home.rglob("acc-mighty.*"):
            file.unlink()


def groups(place: Place) -> list[str]:
    """Consumer groups of this module's names."""
    from kafka.admin import KafkaAdminClient

    from draftloop.pipeline.stream.kafka_connect import client_options

    with KafkaAdminClient(**client_options(place.admin)) as client:
        names = [group["group_id"] if isinstance(group, dict) else group[0] for group in client.list_groups()]
    return [name for name in names if name.startswith(("acc", "access-verify"))]


def test_the_tries_tell_what_real_reads_and_writes_meet(place: Place) -> None:
    observed = {cell[:3]: cell.observed for cell in place.verify().cells}
    write(place.client("acc-hook"), RAW)
    for principal in ("acc-hook", "acc-curator", "acc-trainer", "acc-agent"):
        for topic in (RAW, "acc.stats.smollm2", "acc.audit"):
            for operation, act in (("WRITE", write), ("READ", read)):
                try:
                    act(place.client(principal), topic)
                    met = "allowed"
                except (AccessDeniedError, MissingTopicError):
                    met = "denied"
                assert observed[principal, operation, topic] == met, (principal, operation, topic)


# --- surprises ---


def surprises(matrix: access.Matrix) -> list[tuple[str, str, str, str]]:
    return [
        (cell.principal, cell.operation, cell.topic, cell.observed)
        for cell in matrix.surprises
        if isinstance(cell, Cell)
    ]


def findings(matrix: access.Matrix) -> list[tuple[str, str]]:
    return [(one.kind, one.what) for one in matrix.surprises if isinstance(one, Finding)]


def test_an_acl_added_behind_our_back_is_a_surprise_in_exactly_its_cells_and_extra_in_the_plan(place: Place) -> None:
    extra = Acl("User:acc-trainer", "ALLOW", "READ", "topic", "acc.raw.", "prefixed")
    place.cluster.create_acl(extra)
    eventually(lambda: place.plan().extra_acls == (extra,))
    matrix = place.verify()
    assert surprises(matrix) == [
        ("acc-trainer", "READ", RAW, "allowed"),
        ("acc-trainer", "DESCRIBE", RAW, "allowed"),  # comes with READ
    ]
    with pytest.raises(AccessSurpriseError, match=f"acc-trainer READ {RAW}: expected denied, observed allowed"):
        matrix.check()
    assert place.apply().acts == ()
    assert place.apply(prune=True).acts == ("remove allow User:acc-trainer READ on topic acc.raw.*",)
    assert place.verify().surprises == ()


def test_a_right_for_everybody_is_seen_at_each_of_them(place: Place) -> None:
    place.cluster.create_acl(Acl("User:*", "ALLOW", "DELETE", "topic", "*", "literal"))
    eventually(lambda: len(place.plan().extra_acls) == 1)
    seen = surprises(place.verify())
    assert {cell[0] for cell in seen if cell[1] == "DELETE"} == {p.name for p in place.spec.principals}
    assert {cell[1] for cell in seen} == {"DELETE", "DESCRIBE"}


@pytest.mark.parametrize(
    ("acl", "cell"),
    [
        (Acl("User:spy", "ALLOW", "READ", "topic", "acc.raw.", "prefixed"), ("spy", "READ", RAW)),
        (Acl("User:spy", "ALLOW", "READ", "topic", "*", "literal", "10.9.8.7"), ("spy", "READ", RAW)),
        (Acl("User:ANONYMOUS", "ALLOW", "WRITE", "topic", RAW, "literal"), ("ANONYMOUS", "WRITE", RAW)),
        (Acl("User:spy", "ALLOW", "READ", "group", "acc.curator.", "prefixed"),
         ("spy", "READ", "group:acc.curator.access-verify")),
        (Acl("User:spy", "ALLOW", "ALTER", "cluster", "kafka-cluster", "literal"), ("spy", "ALTER", "cluster")),
        (Acl("User:spy", "ALLOW", "CREATE_TOKENS", "user", "User:acc-hook", "literal"),
         ("spy", "CREATE_TOKENS", "user:User:acc-hook")),
    ],
)  # fmt: skip
def test_a_right_of_somebody_unknown_fails_verify(place: Place, acl: Acl, cell: tuple[str, str, str]) -> None:
    place.cluster.create_acl(acl)
    try:
        eventually(lambda: acl in place.state().acls)
        matrix = place.verify()
        assert findings(matrix) == [("extra_acl", f"extra ACL that the access file does not have: {acl.text()}")]
        assert surprises(matrix) == []
        assert Cell(*cell, "denied", "allowed") in matrix.foreign
        with pytest.raises(AccessSurpriseError, match="1 surprise"):
            matrix.check()
    finally:
        place.cluster.delete_acl(acl)
    eventually(lambda: acl not in place.state().acls)


def test_unknown_users_and_settings_that_drifted_fail_verify_until_they_are_put_right(place: Place) -> None:
    place.cluster.set_password("acc-old", "x" * 20)
    place.cluster.set_configs(RAW, {"message.timestamp.type": "LogAppendTime"})
    eventually(lambda: "acc-old" in place.state().users and bool(place.plan().configs))
    assert findings(place.verify()) == [
        ("extra_user", "user acc-old that the access file does not have"),
        (
            "drift",
            f"changed since it was applied: topic {RAW}: message.timestamp.type LogAppendTime -> CreateTime",
        ),
    ]
    assert place.apply(prune=True).acts == (
        f"change topic {RAW}: message.timestamp.type LogAppendTime -> CreateTime",
        "remove user acc-old (SCRAM-SHA-512)",
    )
    assert "acc-old" not in place.state().users
    place.verify().check()


def test_an_acl_that_went_missing_is_a_surprise_and_in_the_plan(place: Place) -> None:
    lost = Acl("User:acc-hook", "ALLOW", "WRITE", "topic", "acc.raw.", "prefixed")
    place.cluster.delete_acl(lost)
    eventually(lambda: place.plan().acls == (lost,))
    assert surprises(place.verify()) == [
        ("acc-hook", "WRITE", RAW, "denied"),
        ("acc-hook", "DESCRIBE", RAW, "denied"),
    ]
    assert place.apply().acts == ("add allow User:acc-hook WRITE on topic acc.raw.*",)
    assert place.verify().surprises == ()


def test_a_denying_acl_is_a_surprise_too(place: Place) -> None:
    place.cluster.create_acl(Acl("User:acc-hook", "DENY", "WRITE", "topic", RAW, "literal"))
    eventually(lambda: len(place.plan().extra_acls) == 1)
    assert ("acc-hook", "WRITE", RAW, "denied") in surprises(place.verify())


def test_a_wrong_password_is_an_error_cell_not_a_denial(place: Place) -> None:
    file = place.password_file("acc-agent")
    kept = file.read_bytes()
    try:
        file.write_text("not the password\n")
        matrix = place.verify()
        cells = [cell for cell in matrix.cells if cell.principal == "acc-agent"]
        assert len(matrix.surprises) == 1
        assert findings(matrix)[0][1].startswith("acc-agent cannot log in: AuthenticationError: ")
        assert {cell.observed for cell in cells} == {"error: AuthenticationError"}
        assert len(cells) == 67
    finally:
        file.write_bytes(kept)


# --- apply ---


def test_a_second_apply_changes_nothing_and_keeps_every_file(place: Place) -> None:
    assert place.plan().in_sync
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in place.home.rglob("*") if file.is_file()}
    assert len(before) == 12
    assert place.apply().acts == ()
    assert before == {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in place.home.rglob("*") if f.is_file()}


def test_after_a_rotation_only_the_new_password_logs_in(place: Place, tmp_path: Path) -> None:
    old = tmp_path / "old.password"
    shutil.copy(place.password_file("acc-agent"), old)
    security = place.client("acc-agent").required()
    with_old = place.client("acc-agent").model_copy(
        update={"security": security.model_copy(update={"password_file": old})}
    )
    assert admitted(with_old)
    assert place.apply(rotate=["acc-agent"]).acts == ("rotate password of acc-agent",)
    assert place.password_file("acc-agent").read_bytes() != old.read_bytes()
    eventually(lambda: admitted(place.client("acc-agent")))
    eventually(lambda: not admitted(with_old))


def test_quotas_topics_and_settings_are_as_the_file_says(place: Place) -> None:
    state = place.state()
    assert state.quotas["acc-hook"] == {"producer_byte_rate": 134_217_728.0}
    assert state.topics == place.spec.topic_states()
    assert state.topics[CONSENT].configs["cleanup.policy"] == "compact"
    assert state.topics[RAW].configs["message.timestamp.after.max.ms"] == "3600000"


def test_a_quota_of_all_other_users_is_none_of_ours(place: Place) -> None:
    """A cluster's default quota has no user name."""
    from kafka.protocol.admin import AlterClientQuotasRequest

    def default(*, remove: bool) -> None:
        change = ([("user", None)], [("producer_byte_rate", 1e9, remove)])
        place.cluster._send(AlterClientQuotasRequest(entries=[change], validate_only=False))

    default(remove=False)
    try:
        assert None not in place.state().quotas
        assert place.plan().quotas == ()
    finally:
        default(remove=True)


def test_quotas_that_drift_or_go_from_the_file_are_put_right(place: Place) -> None:
    place.cluster.set_quota("acc-hook", {"producer_byte_rate": 1.0, "consumer_byte_rate": 5.0})
    eventually(lambda: len(place.plan().quotas) == 2)
    assert place.apply().acts == (
        "change acc-hook: consumer_byte_rate 5 -> not set",
        "change acc-hook: producer_byte_rate 1 -> 134217728",
    )
    assert place.state().quotas["acc-hook"] == {"producer_byte_rate": 134_217_728.0}


def test_settings_that_drift_are_put_right_and_partitions_only_grow(place: Place) -> None:
    place.cluster.set_configs(RAW, {"retention.ms": "60000", "retention.bytes": "1"})
    eventually(lambda: len(place.plan().configs) == 2)
    assert place.apply().acts == (
        f"change topic {RAW}: retention.bytes 1 -> not set",
        f"change topic {RAW}: retention.ms 60000 -> 259200000",
    )
    grown = packaged(topics=[{"name": "acc.grow", "partitions": 3, "retention": "1h"}], principals=[{"name": "acc-x"}])
    place.cluster.create_topic("acc.grow", TopicState(1, 1, {}))
    try:
        eventually(lambda: "acc.grow" in place.state().topics)
        change = next(change for change in place.plan(grown).partitions)
        assert change.text() == "topic acc.grow: partitions 1 -> 3"
        place.cluster.grow_topic("acc.grow", 3)
        eventually(lambda: place.state().topics["acc.grow"].partitions == 3)
        fewer = packaged(
            topics=[{"name": "acc.grow", "partitions": 2, "retention": "1h"}], principals=[{"name": "acc-x"}]
        )
        with pytest.raises(ConfigError, match=r"acc\.grow has 3 partitions, the file says 2: partitions can only grow"):
            place.apply(fewer)
    finally:
        remove_topic(place, "acc.grow")


def remove_topic(place: Place, topic: str) -> None:
    from kafka.admin import KafkaAdminClient

    from draftloop.pipeline.stream.kafka_connect import client_options

    with KafkaAdminClient(**client_options(place.admin)) as client:
        client.delete_topics([topic])
    eventually(lambda: topic not in place.state().topics)


def test_what_kafka_refuses_is_told_in_its_words_and_names_the_thing(place: Place) -> None:
    with pytest.raises(BrokerError, match=r"create topic 'acc\.bad'.*no\.such\.setting"):
        place.cluster.create_topic("acc.bad", TopicState(1, 1, {"no.such.setting": "1"}))
    with pytest.raises(BrokerError, match=r"(?i)replication factor"):
        place.cluster.create_topic("acc.bad", TopicState(1, 9, {}))


def test_a_principal_without_the_right_can_neither_plan_nor_change(place: Place) -> None:
    from draftloop.pipeline.stream.kafka_admin import KafkaAdmin

    with KafkaAdmin(place.client("acc-trainer")) as trainer:
        with pytest.raises(AccessDeniedError, match="acc-trainer may not look at the cluster"):
            access.plan(place.spec, trainer)
        extra = Acl("User:acc-trainer", "ALLOW", "READ", "topic", "acc.raw.", "prefixed")
        with pytest.raises(AccessDeniedError, match=r"the ACL allow User:acc-trainer READ on topic acc\.raw"):
            trainer.create_acl(extra)
        with pytest.raises(BrokerError, match="user 'acc-hook'"):
            trainer.set_password("acc-hook", "mine now")
        with pytest.raises(AccessDeniedError, match="user 'acc-hook'"):
            trainer.set_quota("acc-hook", {"producer_byte_rate": None})
        with pytest.raises(AccessDeniedError, match=r"topic 'acc\.new'"):
            trainer.create_topic("acc.new", TopicState(1, 1, {}))
    assert place.plan().in_sync


def test_a_principal_with_a_certificate_has_its_rights_without_a_password(broker: LocalBroker, place: Place) -> None:
    from draftloop.pipeline.stream.kafka_admin import KafkaAdmin

    state = broker.state()
    assert state is not None
    spec = packaged(
        principal_prefix="accm-",
        topics=[{"name": "acc.audit", "partitions": 1, "retention": "730d"}],
        principals=[
            {"name": "accm-hook", "auth": "mtls", "acls": [{"allow": ["WRITE"], "topic": "acc.audit"}]},
        ],
    )
    secrets = open_secrets(spec, broker.home, place.admin, mtls_bootstrap=(state.mtls_bootstrap,))
    with KafkaAdmin(place.admin) as cluster:
        access.apply(spec, cluster, secrets, MemoryAudit())
        assert "accm-hook" not in place.state().users
        assert not access.plan(spec, cluster, secrets).to_do
        matrix = access.verify(spec, broker.client)
    assert matrix.surprises == ()
    allowed = {(cell.operation, cell.topic) for cell in matrix.cells if cell.observed == "allowed"}
    assert allowed == {("WRITE", "acc.audit"), ("DESCRIBE", "acc.audit")}


# --- from nothing, with the audit topic itself ---


def test_an_empty_cluster_is_brought_up_verified_and_every_act_is_on_its_audit_topic(own_broker: LocalBroker) -> None:
    from draftloop.pipeline.stream.kafka_admin import KafkaAdmin
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    spec, admin = load_spec(None), own_broker.client("admin")
    log = KafkaLog(admin)
    try:
        with KafkaAdmin(admin) as cluster:
            secrets = open_secrets(spec, own_broker.home, admin)
            done = access.apply(spec, cluster, secrets, LogAudit(log))
            assert access.plan(spec, cluster, secrets).in_sync
            matrix = access.verify(spec, own_broker.client, cluster=cluster)
        assert matrix.surprises == ()
        records = read_audit(log)
    finally:
        log.close()
    assert done.acts[0] == f"create topic {AUDIT_TOPIC}"
    assert [(r.details["what"], r.outcome) for r in records] == [
        (act, outcome) for act in done.acts for outcome in ("begun", "done")
    ]
    assert {record.by for record in records} == {"admin"}
    assert Cell("draftloop-trainer", "READ", "draftloop.raw.smollm2", "denied", "denied") in matrix.cells

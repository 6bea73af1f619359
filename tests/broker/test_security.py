"""Every way to log in, and every way it goes wrong, on a real broker with a listener for each; secrets stay inside."""

from __future__ import annotations

import base64
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from draftloop.pipeline.errors import (
    AuthenticationError,
    CertificateExpiredError,
    ClientCertificateError,
    DraftloopError,
    TlsError,
    UnknownCaError,
)
from draftloop.pipeline.stream import broker as broker_module
from draftloop.pipeline.stream.access_rules import Acl
from draftloop.pipeline.stream.broker import LocalBroker
from draftloop.pipeline.stream.broker_settings import HOST, Ports, free_ports, server_properties
from draftloop.pipeline.stream.certificates import Authority
from draftloop.pipeline.stream.kafka_admin import KafkaAdmin
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity
from draftloop.pipeline.stream.kafka_connect import probe
from draftloop.pipeline.stream.kafka_log import KafkaLog
from draftloop.pipeline.stream.log import LogEntry

CANARY = "canary-51c8"


class Listeners(NamedTuple):
    """One broker's doors, each `host:port`, and what opens them."""

    admin: KafkaConfig  # SASL_SSL
    mtls: str
    expired: str  # TLS with a certificate that has expired
    elsewhere: str  # TLS with a certificate for another host
    bearer: str  # SASL_SSL with OAUTHBEARER
    plain: str  # PLAINTEXT
    sasl_plain: str  # SASL_PLAINTEXT with SCRAM
    ca_file: Path
    authority: Authority

    def tls(self, **settings: Any) -> KafkaSecurity:
        return KafkaSecurity(protocol="SSL", ca_file=self.ca_file, **settings)

    def scram(self, **settings: Any) -> KafkaSecurity:
        security = self.admin.security
        assert security is not None
        return KafkaSecurity.model_validate(security.model_dump() | settings)


@pytest.fixture(scope="module")
def listeners(kafka_libs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listeners]:
    """A broker with more doors than `broker up` makes. Kafka's own OAUTHBEARER for tests takes unsigned tokens."""
    home = tmp_path_factory.mktemp("doors") / "home"
    others = tmp_path_factory.mktemp("others")
    more = [*free_ports(None), *free_ports(None)][:5]
    names = ("EXPIRED", "ELSEWHERE", "BEARER", "PLAIN", "SASL_PLAIN")
    doors = ",".join(f"{name}://{HOST}:{port}" for name, port in zip(names, more, strict=True))
    kinds = "EXPIRED:SSL,ELSEWHERE:SSL,BEARER:SASL_SSL,PLAIN:PLAINTEXT,SASL_PLAIN:SASL_PLAINTEXT"

    def with_more(home: Path, ports: Ports) -> dict[str, str]:
        settings = server_properties(home, ports)
        authority = Authority.at(home / "tls")
        for name, made in {
            "expired": authority.node("broker", hosts=[HOST], days=-1),
            "elsewhere": authority.node("broker", hosts=["kafka.example"]),
        }.items():
            store = others / f"{name}.pem"
            store.write_bytes(made[1] + made[0])
            settings[f"listener.name.{name}.ssl.keystore.location"] = str(store)
        login = "org.apache.kafka.common.security"
        return {
            **settings,
            "listeners": f"{settings['listeners']},{doors}",
            "advertised.listeners": f"{settings['advertised.listeners']},{doors}",
            "listener.security.protocol.map": f"{settings['listener.security.protocol.map']},{kinds}",
            "listener.name.bearer.sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.bearer.oauthbearer.sasl.jaas.config": (
                f'{login}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
            ),
            "listener.name.sasl_plain.scram-sha-512.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker_module, "server_properties", with_more)
        broker = LocalBroker(home)
        state = broker.up(libs=kafka_libs)
    addresses = [f"{HOST}:{port}" for port in more]
    yield Listeners(
        broker.client("admin"), state.mtls_bootstrap, *addresses, home / "tls" / "ca.pem", Authority.at(home / "tls")
    )
    broker.down()


def certificate(listeners: Listeners, folder: Path, name: str, *, days: float = 30) -> dict[str, Path]:
    made = listeners.authority.client(name, days=days)
    files = {"cert_file": folder / f"{name}.pem", "key_file": folder / f"{name}.key"}
    for file, data in zip(files.values(), made, strict=True):
        file.write_bytes(data)
    return files


def why(address: str, security: KafkaSecurity) -> DraftloopError:
    """What the probe says; a log says the same. Both at once: nothing here waits for a time-out."""
    config = KafkaConfig(bootstrap=(address,), security=security)
    log = KafkaLog(config)
    acts: list[Callable[[], object]] = [
        lambda: probe(config),
        log.topics,
        lambda: log.append("t", [LogEntry(b"", b"")]),
    ]
    told = []
    for act in acts:
        before = time.monotonic()
        with pytest.raises(DraftloopError) as error:
            act()
        assert time.monotonic() - before < 2.0
        assert error.value.mend
        told.append(error.value)
    log.close()
    assert {(type(each), each.message) for each in told} == {(type(told[0]), told[0].message)}
    return told[0]


def token_command(subject: str, *, minutes: float = 5) -> tuple[str, ...]:
    """An unsigned token. The canary is in it as a claim."""

    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    now = time.time()
    claims = {"sub": subject, "iat": now - 600, "exp": now + 60 * minutes, "jti": CANARY}
    return (sys.executable, "-c", f"print('{part({'alg': 'none'})}.{part(claims)}.')")


def test_scram_mtls_bearer_token_and_plain_text_on_this_machine_all_work(listeners: Listeners, tmp_path: Path) -> None:
    cluster_id = probe(listeners.admin).cluster_id
    bearer = KafkaSecurity(mechanism="OAUTHBEARER", token_command=token_command("admin"), ca_file=listeners.ca_file)
    for number, (address, security) in enumerate(
        {
            listeners.admin.bootstrap[0]: listeners.scram(),
            listeners.mtls: listeners.tls(**certificate(listeners, tmp_path, "admin")),
            listeners.bearer: bearer,
            listeners.sasl_plain: listeners.scram(protocol="SASL_PLAINTEXT"),
        }.items()
    ):
        config = KafkaConfig(bootstrap=(address,), security=security, cluster_id=cluster_id)
        assert probe(config).cluster_id == cluster_id
        log = KafkaLog(config)
        topic = f"draftloop.door.{number}"
        log.create_topic(topic, num_partitions=1)
        log.append(topic, [LogEntry(b"k", b"%d" % number)])
        assert [entry.value for entry in log.read(topic, 0, 0, 1)] == [b"%d" % number]
        log.commit("draftloop.curator.door", topic, {0: 1})
        assert log.committed("draftloop.curator.door", topic) == {0: 1}
        log.close()


def test_the_principal_is_who_the_login_says(listeners: Listeners, tmp_path: Path) -> None:
    with KafkaAdmin(listeners.admin) as cluster:
        for name in ("by-certificate", "by-token"):
            cluster.create_acl(Acl(f"User:{name}", "ALLOW", "CREATE", "topic", f"draftloop.{name}", "literal"))
            cluster.create_acl(Acl(f"User:{name}", "ALLOW", "DESCRIBE", "topic", f"draftloop.{name}", "literal"))
    token = KafkaSecurity(mechanism="OAUTHBEARER", token_command=token_command("by-token"), ca_file=listeners.ca_file)
    for name, address, security in (
        ("by-certificate", listeners.mtls, listeners.tls(**certificate(listeners, tmp_path, "by-certificate"))),
        ("by-token", listeners.bearer, token),
    ):
        log = KafkaLog(KafkaConfig(bootstrap=(address,), security=security))
        time.sleep(1)  # ACLs reach the node a moment after they are made
        log.create_topic(f"draftloop.{name}", num_partitions=1)
        assert f"draftloop.{name}" in log.topics()
        log.close()


def test_a_wrong_password_and_an_unknown_user_are_told_as_such(listeners: Listeners, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    wrong.chmod(0o600)
    address = listeners.admin.bootstrap[0]
    told = why(address, listeners.scram(password_file=wrong))
    assert type(told) is AuthenticationError
    assert told.message == f"{address} refuses the login of admin (SCRAM-SHA-512)"
    told = why(address, listeners.scram(username="nobody"))
    assert type(told) is AuthenticationError
    assert told.message == f"{address} refuses the login of nobody (SCRAM-SHA-512)"


def test_a_refused_token_is_told_as_such(listeners: Listeners) -> None:
    for command in (token_command("admin", minutes=-1), ("echo", "no-token")):
        told = why(
            listeners.bearer,
            KafkaSecurity(mechanism="OAUTHBEARER", token_command=command, ca_file=listeners.ca_file),
        )
        assert type(told) is AuthenticationError
        assert told.message == f"{listeners.bearer} refuses the token of token_command (OAUTHBEARER)"


def test_a_mechanism_that_is_not_offered_is_told_with_those_that_are(listeners: Listeners) -> None:
    told = why(listeners.bearer, listeners.scram())
    assert type(told) is AuthenticationError
    assert told.message == f"{listeners.bearer} does not take SCRAM-SHA-512: it offers OAUTHBEARER"


def test_an_unknown_ca_is_told(listeners: Listeners, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority.at(tmp_path / "other")
    told = why(listeners.admin.bootstrap[0], listeners.scram(ca_file=other.certificate_file))
    assert type(told) is UnknownCaError
    assert f"is not from the CA in {other.certificate_file}" in told.message


def test_an_expired_certificate_of_the_broker_is_told(listeners: Listeners) -> None:
    told = why(listeners.expired, listeners.tls())
    assert type(told) is CertificateExpiredError
    assert told.message == f"the certificate of {listeners.expired} (or its CA's) has expired"


def test_a_certificate_for_another_host_is_told(listeners: Listeners) -> None:
    told = why(listeners.elsewhere, listeners.tls())
    assert type(told) is TlsError
    assert "is for another host" in told.message


def test_an_expired_certificate_of_ours_is_told(
    listeners: Listeners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = listeners.tls(**certificate(listeners, tmp_path, "admin", days=-1))
    told = why(listeners.mtls, security)
    assert type(told) is CertificateExpiredError
    assert told.message.startswith(f"our own certificate {security.cert_file} expired on ")
    # Without the package that reads certificates the broker's refusal tells, if less exactly.
    monkeypatch.setitem(sys.modules, "cryptography", None)
    told = why(listeners.mtls, security)
    assert type(told) is ClientCertificateError
    assert told.message.startswith(f"{listeners.mtls} refuses our certificate {security.cert_file}")


def test_a_missing_and_a_foreign_client_certificate_are_told(listeners: Listeners, tmp_path: Path) -> None:
    told = why(listeners.mtls, listeners.tls())
    assert type(told) is ClientCertificateError
    assert told.message == f"{listeners.mtls} wants a client certificate and security.cert_file is not set"
    assert type(why(listeners.mtls, listeners.scram())) is ClientCertificateError
    (tmp_path / "other").mkdir()
    foreign = listeners._replace(authority=Authority.at(tmp_path / "other"))
    told = why(listeners.mtls, listeners.tls(**certificate(foreign, tmp_path, "admin")))
    assert type(told) is ClientCertificateError
    assert "refuses our certificate" in told.message


def test_tls_and_plain_text_are_told_from_each_other(listeners: Listeners) -> None:
    address = listeners.admin.bootstrap[0]
    for security in (KafkaSecurity(protocol="PLAINTEXT"), listeners.scram(protocol="SASL_PLAINTEXT")):
        told = why(address, security)
        assert type(told) is TlsError
        assert told.message == f"{address} speaks TLS, security.protocol is {security.protocol}"
    for address in (listeners.plain, listeners.sasl_plain):
        told = why(address, listeners.scram())
        assert type(told) is TlsError
        assert told.message == f"{address} speaks plain text, security.protocol is SASL_SSL"


def test_a_login_that_is_wanted_or_not_wanted_is_told(listeners: Listeners, tmp_path: Path) -> None:
    address = listeners.admin.bootstrap[0]
    told = why(address, listeners.tls())
    assert type(told) is AuthenticationError
    assert told.message == f"{address} closes the connection at the first request: it wants a login"
    told = why(listeners.mtls, listeners.scram(**certificate(listeners, tmp_path, "admin")))
    assert type(told) is AuthenticationError
    assert told.message == f"{listeners.mtls} does not take SCRAM-SHA-512: it offers no login at all"


def test_no_password_token_or_record_shows_in_logs_or_errors(
    listeners: Listeners, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A30: at DEBUG, in every logger, on success and on failure, in the texts of causes too."""
    password = tmp_path / "password"
    password.write_text(CANARY)
    password.chmod(0o600)
    with KafkaAdmin(listeners.admin) as cluster:
        cluster.set_password("canary-user", CANARY)
    command = token_command("canary-user")
    token = command[-1].removeprefix("print('").removesuffix("')")
    topic = "draftloop.raw.canary"
    made = KafkaLog(listeners.admin)
    made.create_topic(topic, num_partitions=1)
    known = KafkaConfig(
        bootstrap=listeners.admin.bootstrap,
        security=listeners.scram(username="canary-user", password_file=password),
        max_record_bytes=2048,
    )
    bearer = KafkaSecurity(mechanism="OAUTHBEARER", token_command=command, ca_file=listeners.ca_file)
    refused = listeners.scram(password_file=password)
    secret = CANARY.encode()
    shown = [repr(known), str(known), known.model_dump_json()]
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("kafka").setLevel(logging.DEBUG)
        logging.getLogger("draftloop").setLevel(logging.DEBUG)
        made.append(topic, [LogEntry(secret, secret)])
        assert [entry.value for entry in made.read(topic, 0, 0, 1)] == [secret]
        for config in (
            known,  # may log in, and nothing else
            known.model_copy(update={"security": refused}),
            known.model_copy(update={"bootstrap": (listeners.bearer,), "security": bearer}),
            known.model_copy(update={"bootstrap": ("127.0.0.1:1",)}),
        ):
            log = KafkaLog(config)
            acts: tuple[Callable[[], object], ...] = (
                lambda log=log: log.append(topic, [LogEntry(secret, secret), LogEntry(secret, secret * 500)]),
                lambda log=log: list(log.read(topic, 0, 0, 1)),
                lambda log=log: log.create_topic("draftloop.no", num_partitions=1),
                lambda log=log: log.commit("draftloop.no", topic, {0: 0}),
            )
            for act in acts:
                with pytest.raises(DraftloopError) as error:
                    act()
                shown.append(texts(error.value))
            log.close()
        made.close()
    logging.getLogger("kafka").setLevel(logging.NOTSET)
    logging.getLogger("draftloop").setLevel(logging.NOTSET)
    out, err = capfd.readouterr()
    logged = "".join(f"{record.getMessage()} {record.exc_text or ''}" for record in caplog.records)
    everything = logged + caplog.text + out + err + "".join(shown)
    assert any(record.name.startswith("kafka.") for record in caplog.records)  # the library did log
    for hidden in (CANARY, token, token.split(".")[1]):
        assert hidden not in everything.replace("canary-user", "").replace("raw.canary", "")


def texts(error: BaseException | None) -> str:
    found = ""
    while error is not None:
        found += f"{error!r} {error} {getattr(error, 'failed', '')} {getattr(error, 'refused', '')}\n"
        error = error.__cause__ or error.__context__
    return found

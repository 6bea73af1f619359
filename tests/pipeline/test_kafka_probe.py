"""What a Kafka client is made of, and what is told of a broker that is not one. No Kafka runs here."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from samples import chain, security

from draftloop.pipeline.errors import (
    AccessDeniedError,
    AuthenticationError,
    BrokerError,
    BrokerUnreachableError,
    CertificateExpiredError,
    ClockError,
    ConfigError,
    DraftloopError,
    InputError,
    MissingTopicError,
    RecordTooLargeError,
    TlsError,
    UnknownCaError,
)
from draftloop.pipeline.stream.certificates import Authority, self_signed
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity
from draftloop.pipeline.stream.tls import tls_context

pytest.importorskip("kafka", reason="needs the extra: pip install 'draftloop[kafka]'")

CANARY = "canary-7f3a"
HERE = ("127.0.0.1:9092",)
FAR = ("kafka.example:9092",)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return new_authority(tmp_path / "tls")


def new_authority(folder: Path) -> Authority:
    folder.mkdir()
    return Authority.at(folder)


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    file = tmp_path / "password"
    file.write_text(f"{CANARY}\n")
    file.chmod(0o600)
    return file


def pair(folder: Path, name: str, made: tuple[bytes, bytes]) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_bytes(made[0])
    key.write_bytes(made[1])
    return certificate, key


def test_the_options_hold_the_password_and_do_not_show_it(authority: Authority, password_file: Path) -> None:
    from draftloop.pipeline.stream.kafka_connect import client_options

    used = security(password_file=password_file, ca_file=authority.certificate_file)
    options = client_options(KafkaConfig(bootstrap=FAR, security=used))
    assert options["sasl_plain_password"] == CANARY
    assert options["sasl_plain_password"].encode() == CANARY.encode()
    assert CANARY not in repr(options) + str(options)
    assert (options["security_protocol"], options["sasl_mechanism"]) == ("SASL_SSL", "SCRAM-SHA-512")
    assert options["sasl_plain_username"] == "hook"


def test_tls_trusts_the_one_ca_and_nothing_older_than_1_2(authority: Authority) -> None:
    context = tls_context(security(ca_file=authority.certificate_file))
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname is True
    assert [dict(pairs[0] for pairs in ca["subject"])["commonName"] for ca in context.get_ca_certs()] == [
        "draftloop local CA"
    ]
    assert tls_context(security(ca_file=authority.certificate_file, check_hostname=False)).check_hostname is False


def test_a_bearer_token_is_asked_for_by_the_client(authority: Authority) -> None:
    from draftloop.pipeline.stream.kafka_connect import client_options

    command = (sys.executable, "-c", "print('t.o.ken')")
    used = security(mechanism="OAUTHBEARER", token_command=command, ca_file=authority.certificate_file)
    options = client_options(KafkaConfig(bootstrap=FAR, security=used))
    assert options["sasl_mechanism"] == "OAUTHBEARER"
    assert options["sasl_oauth_token_provider"].token() == "t.o.ken"
    assert "sasl_plain_password" not in options


def test_plain_text_carries_neither_tls_nor_login() -> None:
    from draftloop.pipeline.stream.kafka_connect import client_options

    options = client_options(KafkaConfig(bootstrap=HERE, security=KafkaSecurity(protocol="PLAINTEXT")))
    assert not {key for key in options if key.startswith(("ssl", "sasl"))}


def test_an_encrypted_key_is_opened_with_its_password(authority: Authority, tmp_path: Path) -> None:
    certificate, key = pair(tmp_path, "hook", authority.client("hook"))
    locked = tmp_path / "locked.key"
    secret = tmp_path / "key.password"
    secret.write_text(CANARY)
    secret.chmod(0o600)
    from cryptography.hazmat.primitives import serialization

    opened = serialization.load_pem_private_key(key.read_bytes(), password=None)
    locked.write_bytes(
        opened.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(CANARY.encode()),
        )
    )
    settings = {"protocol": "SSL", "ca_file": authority.certificate_file, "cert_file": certificate, "key_file": locked}
    tls_context(KafkaSecurity(**settings, key_password_file=secret))
    secret.write_text("not it")
    for wrong in (KafkaSecurity(**settings, key_password_file=secret), KafkaSecurity(**settings)):
        with pytest.raises(
            ConfigError, match=f"cert_file {certificate} with key_file {locked} cannot be used"
        ) as error:
            tls_context(wrong)
        assert "not it" not in chain(error.value)


def test_files_that_are_no_pem_are_named(authority: Authority, tmp_path: Path) -> None:
    certificate, _ = pair(tmp_path, "hook", authority.client("hook"))
    _, other_key = pair(tmp_path, "other", authority.client("other"))
    junk = tmp_path / "junk.pem"
    junk.write_text("no PEM")
    for ca in (junk, tmp_path / "none.pem"):
        with pytest.raises(ConfigError, match=f"ca_file {ca} cannot be used"):
            tls_context(security(ca_file=ca))
    for key in (junk, other_key, tmp_path / "none.key"):
        with pytest.raises(ConfigError, match=f"cert_file {certificate} with key_file {key} cannot be used"):
            tls_context(security(ca_file=authority.certificate_file, cert_file=certificate, key_file=key))


def test_kafka_pythons_debug_lines_and_raw_bytes_do_not_get_out(caplog: pytest.LogCaptureFixture) -> None:
    from draftloop.pipeline.stream.kafka_connect import client_options

    client_options(KafkaConfig(bootstrap=HERE, security=KafkaSecurity(protocol="PLAINTEXT")))
    with caplog.at_level(logging.DEBUG, logger="kafka"):
        for name in ("kafka.producer.kafka", "kafka.net.connection", "kafka.protocol.parser", "kafka.admin.client"):
            logger = logging.getLogger(name)
            logger.debug("Sending (value=%r)", CANARY)
            logger.error("Unable to decode: %r", CANARY.encode())
    assert [record.getMessage() for record in caplog.records] == ["Unable to decode: '<11 bytes>'"] * 4


# --- what is told of a broker that is not one


@contextmanager
def server(handle: Any) -> Iterator[str]:
    """A TCP server on the loopback whose connections `handle` gets, one at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    stream, _ = listener.accept()
                except TimeoutError:
                    continue
                with stream:
                    stream.settimeout(5)
                    try:
                        handle(stream)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


def tls_server(certificate: Path, key: Path) -> Any:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def handle(stream: socket.socket) -> None:
        with context.wrap_socket(stream, server_side=True) as secure:
            secure.recv(4096)

    return handle


def why(address: str, used: KafkaSecurity) -> DraftloopError:
    """What the probe says, which must be said at once."""
    from draftloop.pipeline.stream.kafka_connect import probe

    before = time.monotonic()
    with pytest.raises(DraftloopError) as error:
        probe(KafkaConfig(bootstrap=(address,), security=used, connect_timeout_s=1.0))
    assert time.monotonic() - before < 2.0
    assert error.value.mend
    return error.value


def test_a_port_without_a_listener_is_told(authority: Authority, password_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    told = why(address, security(ca_file=authority.certificate_file, password_file=password_file))
    assert type(told) is BrokerUnreachableError
    assert told.message == f"nothing listens at {address}: Connection refused"


def test_an_unknown_name_is_told(authority: Authority, password_file: Path) -> None:
    told = why("kafka.invalid:9092", security(ca_file=authority.certificate_file, password_file=password_file))
    assert type(told) is BrokerUnreachableError
    assert told.message == "the name 'kafka.invalid' of broker kafka.invalid:9092 is not known here"


def test_a_port_that_takes_connections_and_says_nothing_is_told(authority: Authority, password_file: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # the kernel takes the connection, nobody answers
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    with silent:
        told = why(address, security(ca_file=authority.certificate_file, password_file=password_file))
        assert type(told) is BrokerUnreachableError
        assert told.message == f"{address} takes connections and then says nothing"
        plain = why(address, KafkaSecurity(protocol="PLAINTEXT"))
        assert type(plain) is BrokerUnreachableError


def test_a_web_server_is_not_taken_for_a_broker(authority: Authority, password_file: Path) -> None:
    def handle(stream: socket.socket) -> None:
        stream.recv(4096)
        stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with server(handle) as address:
        told = why(address, KafkaSecurity(protocol="PLAINTEXT"))
        assert type(told) is BrokerUnreachableError
        assert told.message == f"{address} takes connections but does not answer as Kafka does"
        told = why(address, security(ca_file=authority.certificate_file, password_file=password_file))
        assert type(told) is TlsError
        assert told.message.startswith(f"{address} broke the TLS handshake off")


def test_an_expired_server_certificate_is_told(authority: Authority, tmp_path: Path, password_file: Path) -> None:
    expired = pair(tmp_path, "node", authority.node("node", hosts=["127.0.0.1"], days=-1))
    with server(tls_server(*expired)) as address:
        told = why(address, security(ca_file=authority.certificate_file, password_file=password_file))
    assert type(told) is CertificateExpiredError
    assert told.message == f"the certificate of {address} (or its CA's) has expired"


def test_a_certificate_of_another_ca_is_told(authority: Authority, tmp_path: Path, password_file: Path) -> None:
    used = security(ca_file=authority.certificate_file, password_file=password_file)
    other = new_authority(tmp_path / "other")  # of the same name: a local broker's CA that was made anew
    strangers = (other.node("node", hosts=["127.0.0.1"]), self_signed("node", hosts=["127.0.0.1"]))
    for number, made in enumerate(strangers):
        with server(tls_server(*pair(tmp_path, f"node{number}", made))) as address:
            told = why(address, used)
        assert type(told) is UnknownCaError
        assert told.message.startswith(f"the certificate of {address} is not from the CA in {used.ca_file}")


def test_a_certificate_for_another_host_is_told(authority: Authority, tmp_path: Path, password_file: Path) -> None:
    node = pair(tmp_path, "node", authority.node("node", hosts=["kafka.example"]))
    used = security(ca_file=authority.certificate_file, password_file=password_file)
    with server(tls_server(*node)) as address:
        told = why(address, used)
        assert type(told) is TlsError
        assert told.message.startswith(f"the certificate of {address} is for another host")
        unchecked = why(address, used.model_copy(update={"check_hostname": False}))
    assert type(unchecked) is BrokerUnreachableError  # it gets further, and finds no Kafka there


def test_our_own_expired_certificate_is_told_before_it_is_shown(authority: Authority, tmp_path: Path) -> None:
    certificate, key = pair(tmp_path, "hook", authority.client("hook", days=-1))
    node = pair(tmp_path, "node", authority.node("node", hosts=["127.0.0.1"]))
    used = KafkaSecurity(protocol="SSL", ca_file=authority.certificate_file, cert_file=certificate, key_file=key)
    with server(tls_server(*node)) as address:
        told = why(address, used)
    assert type(told) is CertificateExpiredError
    assert told.message.startswith(f"our own certificate {certificate} expired on ")


def test_the_most_telling_of_several_addresses_is_told(
    authority: Authority, tmp_path: Path, password_file: Path
) -> None:
    from draftloop.pipeline.stream.kafka_connect import probe

    expired = pair(tmp_path, "node", authority.node("node", hosts=["127.0.0.1"], days=-1))
    used = security(ca_file=authority.certificate_file, password_file=password_file)
    with server(tls_server(*expired)) as address, pytest.raises(CertificateExpiredError):
        probe(KafkaConfig(bootstrap=("127.0.0.1:1", address), security=used, connect_timeout_s=1.0))


# --- kafka-python's errors as ours


def test_each_error_of_the_client_becomes_one_of_ours() -> None:
    from kafka import errors as kafka_errors

    from draftloop.pipeline.stream.kafka_connect import translate

    config = KafkaConfig(bootstrap=FAR, security=security(username="draftloop-hook"))

    def ours(error: BaseException) -> DraftloopError:
        return translate(error, config, act="append to", resource="topic 't'")

    expected: dict[type[Exception], type[DraftloopError]] = {
        kafka_errors.TopicAuthorizationFailedError: AccessDeniedError,
        kafka_errors.GroupAuthorizationFailedError: AccessDeniedError,
        kafka_errors.ClusterAuthorizationFailedError: AccessDeniedError,
        kafka_errors.SaslAuthenticationFailedError: AuthenticationError,
        kafka_errors.UnknownTopicOrPartitionError: MissingTopicError,
        kafka_errors.MessageSizeTooLargeError: RecordTooLargeError,
        kafka_errors.RecordListTooLargeError: RecordTooLargeError,
        kafka_errors.UnknownMemberIdError: BrokerError,
        kafka_errors.InvalidTopicError: InputError,
        kafka_errors.NotEnoughReplicasError: BrokerError,
        kafka_errors.KafkaTimeoutError: BrokerUnreachableError,
        kafka_errors.KafkaConnectionError: BrokerUnreachableError,
        kafka_errors.NodeNotReadyError: BrokerUnreachableError,
        kafka_errors.PolicyViolationError: BrokerError,
        kafka_errors.InvalidTimestampError: ClockError,
        kafka_errors.InvalidRecordError: BrokerError,
        ConnectionResetError: BrokerUnreachableError,
        ValueError: BrokerError,
    }
    for error, wanted in expected.items():
        told = ours(error(CANARY))
        assert type(told) is wanted
        assert CANARY not in str(told)
    one_of_several = ours(
        kafka_errors.InvalidRecordError(f"Timestamp {CANARY} of message with offset 0 is out of range")
    )
    assert (type(one_of_several), one_of_several.reason) == (ClockError, "clock")
    assert CANARY not in str(one_of_several)
    assert "max_ahead" in (one_of_several.mend or "")
    denied = ours(kafka_errors.TopicAuthorizationFailedError())
    assert denied.message == "draftloop-hook may not append to topic 't'"
    assert "draftloop access plan" in (denied.mend or "")
    known = InputError("known")
    assert ours(known) is known

"""Connecting to Kafka: the options of every client, and a probe that tells failures apart at once.

kafka-python retries a refused login or certificate until a time-out and then says only "unable to bootstrap". The probe
does the same steps on one connection of its own: TCP, TLS, versions, login, metadata, and says which one failed.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Any, NamedTuple, NoReturn

from kafka import errors as kafka_errors
from kafka.net.sasl import get_sasl_mechanism
from kafka.net.sasl.oauth import AbstractTokenProvider
from kafka.protocol.broker_version_data import BrokerVersionData
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest
from kafka.protocol.parser import KafkaProtocol
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from draftloop.pipeline.errors import (
    AccessDeniedError,
    AuthenticationError,
    BrokerError,
    BrokerUnreachableError,
    ClockError,
    DraftloopError,
    InputError,
    MissingTopicError,
    RecordTooLargeError,
    TlsError,
    WrongClusterError,
)
from draftloop.pipeline.stream import tls
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity

CLIENT_ID = "draftloop"
_RECONNECT_MOST_MS = 1_000  # between tries of a client: an outage's end is seen within this


class Cluster(NamedTuple):
    """What a broker says of its cluster."""

    cluster_id: str
    num_brokers: int
    release: str  # the newest Kafka release whose requests it knows, as "4.3"


class _Hidden(str):
    """A secret that does not show in the repr of what holds it."""

    def __repr__(self) -> str:
        return "'***'"


class _CommandToken(AbstractTokenProvider):  # type: ignore[misc]
    """kafka-python's way to ask for a bearer token."""

    def __init__(self, security: KafkaSecurity) -> None:
        super().__init__()
        self._security = security

    def token(self) -> str:
        return self._security.token()


class _Discreet(logging.Filter):
    """Stops kafka-python's DEBUG lines, which hold tokens and whole records, and the raw bytes in a few others."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return False
        if isinstance(record.args, tuple):
            record.args = tuple(
                f"<{len(arg)} bytes>" if isinstance(arg, bytes | bytearray | memoryview) else arg for arg in record.args
            )
        return True


_DISCREET = _Discreet()


def _hush() -> None:
    # A filter works on its own logger only, not on those below it: hence every one of the library's.
    for name in list(logging.Logger.manager.loggerDict):
        if name == "kafka" or name.startswith("kafka."):
            logging.getLogger(name).addFilter(_DISCREET)


def client_options(config: KafkaConfig) -> dict[str, Any]:
    """Options common to all kafka-python clients. Raises ConfigError: a setting, a secret or a file is missing."""
    _hush()
    security = config.required()
    options: dict[str, Any] = {
        "bootstrap_servers": list(config.bootstrap),
        "client_id": CLIENT_ID,
        "security_protocol": security.protocol,
        "bootstrap_timeout_ms": _ms(config.connect_timeout_s),
        "request_timeout_ms": _ms(config.request_timeout_s),
        "reconnect_backoff_max_ms": _RECONNECT_MOST_MS,
    }
    if security.encrypted:
        options["ssl_context"] = tls.tls_context(security)
    return options | _login_options(security)


def _login_options(security: KafkaSecurity) -> dict[str, Any]:
    if not security.logs_in:
        return {}
    if security.mechanism == "OAUTHBEARER":
        return {"sasl_mechanism": security.mechanism, "sasl_oauth_token_provider": _CommandToken(security)}
    return {
        "sasl_mechanism": security.mechanism,
        "sasl_plain_username": security.username,
        "sasl_plain_password": _Hidden(security.password()),
    }


def probe(config: KafkaConfig) -> Cluster:
    """Connect and log in as a client would, with the first bootstrap address that works.

    Raises at once BrokerUnreachableError, TlsError, UnknownCaError, CertificateExpiredError, ClientCertificateError,
    AuthenticationError, WrongClusterError, ConfigError; within `connect_timeout_s` per address where nothing answers.
    """
    _hush()
    config.required()
    failures: list[DraftloopError] = []
    for address in config.bootstrap:
        try:
            return _probe_one(address, config)
        except (BrokerUnreachableError, TlsError) as error:
            failures.append(error)
    telling = [error for error in failures if not isinstance(error, BrokerUnreachableError)]
    raise (telling or failures)[0]


def _probe_one(address: str, config: KafkaConfig) -> Cluster:
    with _Dialog(address, config) as dialog:
        dialog.learn_versions()
        dialog.log_in()
        metadata = dialog.ask(MetadataRequest(topics=[], allow_auto_topic_creation=False))
    found = metadata.cluster_id or ""
    require_cluster(found, address, config)
    announced = [f"{broker.host}:{broker.port}" for broker in metadata.brokers]
    _require_reachable(announced, address, config)
    return Cluster(found, len(announced), dialog.release)


def require_cluster(found: str, address: str, config: KafkaConfig) -> None:
    """Raises WrongClusterError where another cluster is pinned than the one found at an address."""
    if config.cluster_id is not None and found != config.cluster_id:
        raise WrongClusterError(
            f"{address} belongs to cluster {found or '(unnamed)'}, not to {config.cluster_id} (cluster_id)",
            mend="correct bootstrap; where the cluster was made anew on purpose, set the new cluster_id",
        )


def _require_reachable(announced: list[str], address: str, config: KafkaConfig) -> None:
    """Clients go on with the addresses that brokers announce: one of these at least must be there."""
    if not announced or address in announced:
        return
    for other in announced:
        try:
            tls.connect(other, timeout_s=config.connect_timeout_s).close()
            return
        except BrokerUnreachableError:
            continue
    raise BrokerUnreachableError(
        f"{address} answers, but announces itself as {', '.join(announced)}, which cannot be reached from here",
        mend="set the broker's advertised.listeners to an address that its clients can reach",
    )


class _Dialog:
    """Requests and answers over one blocking connection."""

    def __init__(self, address: str, config: KafkaConfig) -> None:
        self._address = address
        self._config = config
        self._security = config.required()
        self._deadline = time.monotonic() + config.connect_timeout_s
        self._protocol = KafkaProtocol(client_id=CLIENT_ID)
        self._versions: Any = None
        self._stream: socket.socket = tls.connect(address, timeout_s=config.connect_timeout_s)
        if self._security.encrypted:
            self._stream.settimeout(tls.deadline_left(self._deadline))
            try:
                self._stream = tls.wrap(self._stream, address, self._security)
            except TlsError as error:
                if type(error) is TlsError and _speaks_plain_text(address, config):
                    raise self._mismatch("plain text", "PLAINTEXT or SASL_PLAINTEXT (loopback only)") from error
                raise

    def __enter__(self) -> _Dialog:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def release(self) -> str:
        return ".".join(str(part) for part in self._versions.broker_version[:2])

    def ask(self, request: Any) -> Any:
        """One request and its answer. Raises BrokerUnreachableError where none comes."""
        try:
            return self._exchange(request)
        except (OSError, EOFError, kafka_errors.KafkaError) as error:
            raise BrokerUnreachableError(
                f"{self._address} broke off at {type(request).__name__}: {type(error).__name__}",
                mend="see the broker's log; try again",
            ) from error

    def learn_versions(self) -> None:
        """The first round trip: with TLS 1.3 the moment a refused client certificate is told."""
        try:
            answer = self._exchange(ApiVersionsRequest(version=0))
        except TimeoutError as error:
            raise self._silent() from error
        except (OSError, EOFError, kafka_errors.KafkaError) as error:
            self._explain_first(error)
        ranges = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
        self._versions = BrokerVersionData(api_versions=ranges)

    def log_in(self) -> None:
        """The SASL exchange, with kafka-python's own mechanisms. Raises AuthenticationError."""
        if not self._security.logs_in:
            self._require_no_login()
            return
        mechanism = self._security.mechanism
        hello = self.ask(SaslHandshakeRequest(mechanism=mechanism))
        if hello.error_code:
            offered = ", ".join(hello.mechanisms) or "no login at all"
            raise AuthenticationError(
                f"{self._address} does not take {mechanism}: it offers {offered}",
                mend="set security.mechanism to one of these, or security.protocol = SSL where it offers none",
            )
        options = {"security_protocol": self._security.protocol, **_login_options(self._security)}
        exchange = get_sasl_mechanism(mechanism)(host=tls.split_address(self._address)[0], **options)
        while not exchange.is_done():
            answer = self.ask(SaslAuthenticateRequest(auth_bytes=exchange.auth_bytes()))
            if answer.error_code:
                raise self._refused()
            try:
                exchange.receive(answer.auth_bytes)
            except (ValueError, KeyError) as error:  # the broker cannot prove that it knows the password
                raise AuthenticationError(
                    f"{self._address} did not answer the login of {self._security.principal} as {mechanism} demands",
                    mend="make sure that this is your broker",
                ) from error

    def _refused(self) -> AuthenticationError:
        security = self._security
        if security.mechanism == "OAUTHBEARER":
            what, mend = (
                "the token of token_command",
                "check its audience, issuer and expiry: run token_command by hand",
            )
        else:
            what = f"the login of {security.principal}"
            mend = "check username and password; users are made by `draftloop access apply`"
        return AuthenticationError(f"{self._address} refuses {what} ({security.mechanism})", mend=mend)

    def _require_no_login(self) -> None:
        """Without a login the first real request is answered only where none is wanted."""
        try:
            self._exchange(MetadataRequest(topics=[], allow_auto_topic_creation=False))
        except (OSError, EOFError, kafka_errors.KafkaError) as error:
            raise AuthenticationError(
                f"{self._address} closes the connection at the first request: it wants a login",
                mend=f"set security.protocol to {'SASL_SSL' if self._security.encrypted else 'SASL_PLAINTEXT'}"
                " with username and password, or use the broker's SSL listener",
            ) from error

    def _exchange(self, request: Any) -> Any:
        if self._versions is not None:
            request.API_VERSION = self._versions.api_version(request)
        self._protocol.send_request(request)
        self._stream.settimeout(tls.deadline_left(self._deadline))
        self._stream.sendall(self._protocol.send_bytes())
        while True:
            self._stream.settimeout(tls.deadline_left(self._deadline))
            received = self._stream.recv(65536)
            if not received:
                raise EOFError
            answers = self._protocol.receive_bytes(received)
            if answers:
                return answers[0][1]

    def _explain_first(self, error: Exception) -> NoReturn:
        if self._security.encrypted and isinstance(error, OSError):
            raise tls.explain(error, self._address, self._security) from error
        if not self._security.encrypted and tls.speaks_tls(self._address, timeout_s=self._config.connect_timeout_s):
            raise self._mismatch("TLS", "SASL_SSL or SSL, with ca_file") from error
        raise self._silent() from error

    def _mismatch(self, spoken: str, protocol: str) -> TlsError:
        return TlsError(
            f"{self._address} speaks {spoken}, security.protocol is {self._security.protocol}",
            mend=f"set security.protocol to {protocol}, or connect to the other port",
        )

    def _silent(self) -> BrokerUnreachableError:
        return BrokerUnreachableError(
            f"{self._address} takes connections but does not answer as Kafka does",
            mend="is the broker frozen or still starting, or the port another program's?",
        )


def _speaks_plain_text(address: str, config: KafkaConfig) -> bool:
    try:
        with tls.connect(address, timeout_s=config.connect_timeout_s) as stream:
            protocol = KafkaProtocol(client_id=CLIENT_ID)
            protocol.send_request(ApiVersionsRequest(version=0))
            stream.sendall(protocol.send_bytes())
            return bool(protocol.receive_bytes(stream.recv(65536)))
    except (OSError, BrokerUnreachableError, kafka_errors.KafkaError):
        return False


def translate(error: BaseException, config: KafkaConfig, *, act: str, resource: str) -> DraftloopError:
    """A kafka-python error as one of ours. act: a verb ("append to"); resource: "topic 'x'", "group 'y'".

    Quotes nothing of the library's text: it may hold a request, and a request may hold a secret.
    """
    if isinstance(error, DraftloopError):
        return error
    principal = config.security.principal if config.security else "nobody"
    name = type(error).__name__
    # Who may write no topic at all gets no producer id, which kafka-python tells in a text only.
    if isinstance(error, kafka_errors.AuthorizationError) or "ClusterAuthorizationFailed" in str(error):
        return AccessDeniedError(
            f"{principal} may not {act} {resource}",
            mend="each part logs in as a user of its own (docs/kafka.md: the hook writes, the curator reads): give the"
            " client file of the right one; whether a right is missing shows `draftloop access plan`",
        )
    if isinstance(error, kafka_errors.SaslAuthenticationFailedError):
        return AuthenticationError(
            f"the broker refuses the login of {principal}", mend="check username and password, or the token"
        )
    if isinstance(error, kafka_errors.UnknownTopicOrPartitionError | kafka_errors.UnknownTopicIdError):
        return MissingTopicError(
            f"could not {act} {resource}: it is not there", mend="`draftloop access apply` makes it"
        )
    if isinstance(error, _TOO_LARGE):
        return RecordTooLargeError(
            f"a record is over the limit of {resource}", mend="raise the topic's max.message.bytes, or send less"
        )
    # Of several in one batch kafka-python tells only in a text what is wrong with them.
    if isinstance(error, kafka_errors.InvalidTimestampError) or (
        isinstance(error, kafka_errors.InvalidRecordError) and "timestamp" in str(error).lower()
    ):
        return ClockError(
            f"could not {act} {resource}: a record's time is further ahead of the broker's clock than the topic takes",
            mend="set this machine's clock and the broker's (`timedatectl`); a topic takes what is max_ahead ahead"
            " in the access file",
        )
    if isinstance(error, _GROUP_IN_USE):
        return BrokerError(
            f"could not {act} {resource}: another consumer is a member of it",
            mend="stop that consumer, or use a group of its own: offsets here are committed without membership",
        )
    if isinstance(error, _BAD_NAME):
        return InputError(
            f"could not {act} {resource}: Kafka does not take that name", mend="use letters, digits, . _ -"
        )
    if isinstance(error, _TOO_FEW_REPLICAS):
        return BrokerError(
            f"could not {act} {resource}: too few replicas are in sync",
            mend="bring the missing brokers back, or lower the topic's min.insync.replicas",
        )
    if isinstance(error, kafka_errors.RetriableError | OSError):
        return BrokerUnreachableError(
            f"could not {act} {resource} on {', '.join(config.bootstrap)}: {name}",
            mend="is the broker up? `draftloop doctor` tells what is wrong; then try again",
        )
    described = getattr(error, "description", None)
    return BrokerError(f"could not {act} {resource}: {name}{f' ({described})' if described else ''}")


_TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)
_GROUP_IN_USE = (
    kafka_errors.UnknownMemberIdError,
    kafka_errors.IllegalGenerationError,
    kafka_errors.RebalanceInProgressError,
    kafka_errors.FencedInstanceIdError,
    kafka_errors.NonEmptyGroupError,
)
_BAD_NAME = (kafka_errors.InvalidTopicError, kafka_errors.InvalidGroupIdError)
_TOO_FEW_REPLICAS = (kafka_errors.NotEnoughReplicasError, kafka_errors.NotEnoughReplicasAfterAppendError)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))

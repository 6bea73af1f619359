"""What a local Kafka node is told: one dictionary that becomes server.properties, and its ports."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from draftloop.pipeline.errors import LocalBrokerError

HOST = "127.0.0.1"
# CN of the node's certificate, and with that a super user. Kafka takes ASCII only for a name that logs in by SCRAM: no
# user of this name can be made that gets in.
NODE_NAME = "broker\N{MIDDLE DOT}node"
ADMIN_NAME = "admin"
MAX_RECORD_BYTES = 4 * 2**20
BATCH_OVERHEAD_BYTES = 64 * 2**10  # a batch's header and a record's own fields are counted too
# Outside Linux's range for outgoing connections: a client that calls a broker that is down could otherwise be given
# the broker's own port, reach itself, and keep the broker from starting.
PORT_RANGE = range(20000, 32000)
_PORT_TRIES = 200


class Ports(NamedTuple):
    """The three listeners' ports on the loopback address."""

    sasl: int
    mtls: int
    controller: int


def server_properties(home: Path, ports: Ports) -> dict[str, str]:
    """Every setting of the node; it is reached with a certificate or a password, and may nothing without an ACL."""
    tls = home / "tls"
    listeners = f"SASL_SSL://{HOST}:{ports.sasl},SSL://{HOST}:{ports.mtls}"
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{ports.controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"{listeners},CONTROLLER://{HOST}:{ports.controller}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": "SASL_SSL:SASL_SSL,SSL:SSL,CONTROLLER:SSL",
        # The node calls itself with its own certificate: no password of its own has to lie in this file.
        "inter.broker.listener.name": "SSL",
        "listener.name.ssl.ssl.client.auth": "required",
        # The controller's port trusts one self-signed certificate, the node's own: no other client of the CA gets in.
        "listener.name.controller.ssl.client.auth": "required",
        "listener.name.controller.ssl.keystore.location": str(tls / "controller.pem"),
        "listener.name.controller.ssl.truststore.location": str(tls / "controller-only.pem"),
        "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/,DEFAULT",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(tls / "node.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(tls / "ca.pem"),
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "false",
        "super.users": f"User:{ADMIN_NAME};User:{NODE_NAME}",
        "auto.create.topics.enable": "false",
        "message.max.bytes": str(MAX_RECORD_BYTES + BATCH_OVERHEAD_BYTES),
        "num.partitions": "4",
        **_ONE_NODE,
        "log.dirs": str(home / "data"),
    }


# One node has no second to copy to, and small internal topics and buffers start faster.
_ONE_NODE = {
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.dedupe.buffer.size": str(8 * 2**20),
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "1000",
}


def properties_text(settings: Mapping[str, str]) -> str:
    """Settings as Java reads them: Latin-1, everything else escaped."""
    return "".join(f"{_escaped(key)}={_escaped(value)}\n" for key, value in settings.items())


def free_ports(wanted: Ports | None) -> Ports:
    """The ports wanted if all are free, else three others. Raises LocalBrokerError where none is found."""
    if wanted is not None and all(_is_free(port) for port in wanted):
        return wanted
    found: list[int] = []
    for port in random.SystemRandom().sample(PORT_RANGE, _PORT_TRIES):
        if _is_free(port):
            found.append(port)
        if len(found) == len(Ports._fields):
            return Ports(*found)
    raise LocalBrokerError(
        f"no free ports from {PORT_RANGE.start} to {PORT_RANGE.stop} on {HOST}",
        mend="see what listens there: `ss -ltn`",
    )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        candidate.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as Java does: remains of connections are no bar
        try:
            candidate.bind((HOST, port))
        except OSError:
            return False
    return True


def _escaped(text: str) -> str:
    """Java skips white space before a value and takes a backslash for its own; it counts in UTF-16 units."""
    units = text.encode("utf-16-be", "surrogatepass")
    codes = [int.from_bytes(units[index : index + 2], "big") for index in range(0, len(units), 2)]
    plain = [0x20 <= code < 0x7F and code != 0x5C and (index > 0 or code != 0x20) for index, code in enumerate(codes)]
    return "".join(chr(code) if as_is else f"\\u{code:04x}" for code, as_is in zip(codes, plain, strict=True))

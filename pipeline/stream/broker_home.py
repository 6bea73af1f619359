"""The files of a local broker's home: whose folder it is, its certificates, its cluster's name, its clients."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from draftloop.pipeline.errors import LocalBrokerError
from draftloop.pipeline.stream.broker_settings import HOST, NODE_NAME
from draftloop.pipeline.stream.certificates import RENEW_DAYS, Authority, days_left, self_signed, write_private
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity, read_client, write_client

MARKER = ".draftloop-broker"  # says that a folder is a broker's home, and is the lock of whoever changes it
SERVED_HOSTS = ("localhost", HOST)


def claim(home: Path) -> None:
    """Make the folder, or find it ours; only its owner gets in. Raises LocalBrokerError where it is somebody else's."""
    if {",", "\n"} & set(str(home)):
        raise LocalBrokerError(f"{home}: Kafka takes ',' for the end of a path", mend="give another --home")
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.listdir(home)
        # Asked twice: the first `up` of somebody else may be making it at this moment.
        if found and MARKER not in found and not (home / MARKER).exists():
            raise LocalBrokerError(
                f"{home} is not a broker's home and not empty (it holds {sorted(found)[0]!r})",
                mend="give --home a folder of its own",
            )
        home.chmod(0o700)
    except OSError as error:
        raise LocalBrokerError(f"{home} cannot be a broker's home: {error}", mend="give another --home") from error


def certify(home: Path) -> None:
    """The CA and the node's two certificates, made where they are missing or run out soon. Raises LocalBrokerError."""
    tls = home / "tls"
    tls.mkdir(mode=0o700, exist_ok=True)
    authority = Authority.at(tls)
    if not authority.vouches_for(tls / "node.pem"):
        certificate, key = authority.node(NODE_NAME, hosts=SERVED_HOSTS)
        write_private(tls / "node.pem", key + certificate + authority.certificate_file.read_bytes())
    if min(days_left(tls / "controller.pem"), days_left(tls / "controller-only.pem")) < RENEW_DAYS:
        certificate, key = self_signed(NODE_NAME, hosts=SERVED_HOSTS)
        write_private(tls / "controller-only.pem", certificate)
        write_private(tls / "controller.pem", key + certificate)


def certified(home: Path, principal: str, mtls_bootstrap: str) -> KafkaConfig:
    """How `principal` reaches the mTLS listener, with a certificate made on the spot. Raises LocalBrokerError."""
    tls = home / "tls"
    certificate, key = tls / f"{Path(principal).name}.pem", tls / f"{Path(principal).name}.key"
    authority = Authority.at(tls)
    if not (authority.vouches_for(certificate) and key.exists()):
        certificate_pem, key_pem = authority.client(principal)
        write_private(key, key_pem)
        write_private(certificate, certificate_pem)
    security = KafkaSecurity(protocol="SSL", ca_file=tls / "ca.pem", cert_file=certificate, key_file=key)
    return KafkaConfig(bootstrap=(mtls_bootstrap,), security=security)


def cluster_of(home: Path) -> str | None:
    """The id the data folder was formatted with; None where it was not yet. Raises LocalBrokerError."""
    file = home / "data" / "meta.properties"
    try:
        text = file.read_text(errors="replace")
    except FileNotFoundError:
        return None
    found = re.search(r"^cluster\.id=(\S+)$", text, re.MULTILINE)
    if found is None:
        raise LocalBrokerError(f"{file} is damaged: it names no cluster", mend=f"move {home / 'data'} away")
    return found[1]


def readdress(home: Path, moved: Mapping[str, str]) -> None:
    """Tell every client's file where the broker listens now. moved: old address -> new. Raises ConfigError."""
    for file in sorted((home / "clients").glob("*.toml")):
        config = read_client(file)
        bootstrap = tuple(moved.get(address, address) for address in config.bootstrap)
        if bootstrap != config.bootstrap:
            write_client(file, config.model_copy(update={"bootstrap": bootstrap}))

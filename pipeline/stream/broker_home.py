"""The files of a local broker's home: whose folder it is, its certificates, its cluster's name, its clients."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from draftloop.pipeline.errors import ConfigError, LocalBrokerError
from draftloop.pipeline.stream.broker_settings import ADMIN_NAME, HOST, NODE_NAME
from draftloop.pipeline.stream.certificates import RENEW_DAYS, Authority, common_name, days_left, self_signed
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity, read_client, write_client
from draftloop.pipeline.stream.private_files import make_private, not_ours, write_private

MARKER = ".draftloop-broker"  # says that a folder is a broker's home, and is the lock of whoever changes it
PRIVATE_FOLDERS = ("tls", "secrets", "clients")
SERVED_HOSTS = ("localhost", HOST)


def claim(home: Path) -> None:
    """Make the folder, or find it ours; only its owner gets in. Raises LocalBrokerError where it is somebody else's."""
    if {",", "\n"} & set(str(home)):
        raise LocalBrokerError(f"{home}: Kafka takes ',' for the end of a path", mend="give another --home")
    try:
        if not home.exists():
            make_private(home)
        elif not_ours(home, may_be_written=True) is None and not os.listdir(home):
            home.chmod(0o700)
        found = os.listdir(home)
        # Asked twice: the first `up` of somebody else may be making it at this moment.
        if found and MARKER not in found and not (home / MARKER).exists():
            raise LocalBrokerError(
                f"{home} is not a broker's home and not empty (it holds {sorted(found)[0]!r})",
                mend="give --home a folder of its own",
            )
        require_ours(home)
        home.chmod(0o700)
    except OSError as error:
        raise LocalBrokerError(f"{home} cannot be a broker's home: {error}", mend="give another --home") from error


def require_ours(home: Path) -> None:
    """Raises LocalBrokerError where somebody else may have put passwords, keys or settings of his into a home."""
    folders = [home / name for name in (*PRIVATE_FOLDERS, "data")]
    owned = list(home.iterdir()) if home.is_dir() else []
    tight = [home, *folders, *(home / name for name in (MARKER, "broker.json", "server.properties"))]
    for folder in folders[: len(PRIVATE_FOLDERS)]:
        tight += folder.iterdir() if folder.is_dir() else ()
    for path, may_be_written in (*((path, False) for path in tight), *((path, True) for path in owned)):
        try:
            wrong = not_ours(path, may_be_written=may_be_written)
        except FileNotFoundError:  # not made yet, or a draft that has become what it was for
            continue
        if wrong is not None:
            raise LocalBrokerError(
                f"{wrong[0]}: somebody else could know its passwords or be its administrator",
                mend=f"give another --home; or, where nobody has been at it, {wrong[1]}",
            )


def furnish(home: Path) -> None:
    """Make the folders of a home, for its owner alone whatever the umask. Raises OSError."""
    for name in PRIVATE_FOLDERS:
        make_private(home / name)
        (home / name).chmod(0o700)
    make_private(home / "data")


def certify(home: Path) -> None:
    """The CA and the node's two certificates, made where they are missing or run out soon. Raises LocalBrokerError."""
    tls = home / "tls"
    make_private(tls)
    authority = Authority.at(tls)
    if not authority.vouches_for(tls / "node.pem") or common_name(tls / "node.pem") != NODE_NAME:
        certificate, key = authority.node(NODE_NAME, hosts=SERVED_HOSTS)
        write_private(tls / "node.pem", key + certificate + authority.certificate_file.read_bytes())
    pair = (tls / "controller.pem", tls / "controller-only.pem")
    if min(map(days_left, pair)) < RENEW_DAYS or {common_name(file) for file in pair} != {NODE_NAME}:
        certificate, key = self_signed(NODE_NAME, hosts=SERVED_HOSTS)
        write_private(pair[1], certificate)
        write_private(pair[0], key + certificate)


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


class Listeners(NamedTuple):
    """Where a local broker listens, each `host:port`."""

    cluster_id: str
    sasl: str
    mtls: str


def readdress(home: Path, now: Listeners, tell: Callable[[str], None]) -> None:
    """Tell every client's file of this cluster where the broker listens now; what cannot be mended is told.

    The administrator's is left out: `admit` writes it anew every time.
    """
    for file in sorted((home / "clients").glob("*.toml")):
        if file.stem == ADMIN_NAME:
            continue
        try:
            config = read_client(file)
            bootstrap = _moved(config, now)
            if bootstrap != config.bootstrap:
                write_client(file, config.model_copy(update={"bootstrap": bootstrap}))
        except (ConfigError, OSError) as error:
            tell(f"{error}\n  not told where the broker listens; `draftloop access apply --home {home}` makes it anew")


def _moved(config: KafkaConfig, now: Listeners) -> tuple[str, ...]:
    """A client's addresses, or those of today where they are this broker's: the ports it had before are in no file."""
    hosts = {address.rpartition(":")[0] for address in config.bootstrap}
    security = config.security
    if security is None or config.cluster_id not in (None, now.cluster_id) or not hosts <= set(SERVED_HOSTS):
        return config.bootstrap
    if not security.encrypted:  # a listener that somebody added
        return config.bootstrap
    port = (now.sasl if security.logs_in else now.mtls).rpartition(":")[2]
    return tuple(dict.fromkeys(f"{address.rpartition(':')[0]}:{port}" for address in config.bootstrap))

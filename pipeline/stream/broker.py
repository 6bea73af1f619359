"""A real Apache Kafka on this machine, for development and tests: one node in a folder of its own.

Everything it needs and leaves is under its home: certificates, passwords, data, log, how to reach it. No password is
on a command line, in Kafka's settings or in a log: the node talks to itself by certificate, and the administrator's
password is set over a connection with the administrator's certificate.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from draftloop.pipeline.errors import KafkaJarsNotFoundError, LeaseHeldError, LocalBrokerError
from draftloop.pipeline.lease import lease
from draftloop.pipeline.stream.broker_jars import fetch, find_libs
from draftloop.pipeline.stream.broker_java import (
    ProcessIdentity,
    find_java,
    resident_mb,
    run_java,
    runs,
    spawn_java,
    stop,
    uptime_s,
)
from draftloop.pipeline.stream.broker_settings import (
    ADMIN_NAME,
    HOST,
    NODE_NAME,
    Ports,
    free_ports,
    properties_text,
    server_properties,
)
from draftloop.pipeline.stream.certificates import (
    RENEW_DAYS,
    Authority,
    days_left,
    self_signed,
    write_private,
)
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity, read_client, write_client

__all__ = ["BrokerState", "LocalBroker", "fetch", "find_java", "find_libs"]

MARKER = ".draftloop-broker"  # says that a folder is a broker's home, and is the lock of whoever changes it
FORMAT_TIMEOUT_S = 60.0
POLL_S = 0.1
MAX_LOG_BYTES = 16 * 2**20
QUOTED_LINES = 5
_JVM_FLAGS = (
    "-Xms128m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss,SSS",
    "-Dlog4j2.level=WARN",  # where $KAFKA_HOME's own jars bring log4j instead
)


class BrokerState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of broker.json: who the broker is, where it listens, which process it was last."""

    pid: int
    started: str
    cluster_id: str
    bootstrap: str
    mtls_bootstrap: str
    controller: str
    libs: str

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started)

    @property
    def ports(self) -> Ports:
        addresses = (self.bootstrap, self.mtls_bootstrap, self.controller)
        return Ports(*(int(address.rpartition(":")[2]) for address in addresses))


class LocalBroker:
    """One Apache Kafka node whose home is `home`. Safe to use from several processes at once."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()

    def up(self, *, libs: Path | None, wait_s: float = 60, on_wait: Callable[[str], None] | None = None) -> BrokerState:
        """Start the broker, or find it running, and return when the administrator can log in.

        Raises LocalBrokerError (JavaNotFoundError, KafkaJarsNotFoundError) and leaves nothing running of what it
        started; LeaseHeldError where another process is starting or stopping it all the time.
        """
        deadline = time.monotonic() + wait_s
        tell = on_wait or (lambda _: None)
        self._claim()
        with self._alone(deadline):
            state = self.state()
            if state is not None and runs(state.process):
                self._wait_until_ready(state, deadline, tell, offset=self._log_size())
                return state
            state, offset = self._start(state, libs, tell)
            try:
                self._wait_until_ready(state, deadline, tell, offset=offset)
            except BaseException:
                stop(state.process, wait_s=1.0)
                raise
            return state

    def down(self, *, wait_s: float = 30) -> bool:
        """Stop the broker; data, certificates and passwords stay. False: it did not run. Raises LocalBrokerError."""
        if not (self.home / MARKER).exists():
            return False
        with self._alone(time.monotonic() + wait_s):
            state = self.state()
            return state is not None and stop(state.process, wait_s=wait_s)

    def state(self) -> BrokerState | None:
        """What broker.json says, whether it runs or not; None where it was never started. Raises LocalBrokerError."""
        file = self.home / "broker.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=BrokerState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise LocalBrokerError(
                f"{file} cannot be read: {error}",
                mend="stop the Java process of this home, if one runs, and delete the file; data and passwords stay",
            ) from error

    def status(self) -> dict[str, Any]:
        """Whether it runs, where, since when (s) and how large (MB). Raises LocalBrokerError."""
        state = self.state()
        if state is None:
            return {"running": False, "home": str(self.home)}
        told = {**msgspec.to_builtins(state), "home": str(self.home)}
        if not runs(state.process):
            return {**told, "running": False, "pid": None}
        rss_mb = round(resident_mb(state.process), 1)
        return {**told, "running": True, "uptime_s": round(uptime_s(state.process), 1), "rss_mb": rss_mb}

    def log_tail(self, lines: int) -> list[str]:
        """The last lines of the broker's own log; empty where there is none."""
        return self._log_lines(0)[-lines:] if lines > 0 else []

    def client(self, principal: str) -> KafkaConfig:
        """How `principal` reaches this broker. Raises ConfigError where it was not made yet."""
        return read_client(self.home / "clients" / f"{Path(principal).name}.toml")

    def certified(self, principal: str) -> KafkaConfig:
        """How `principal` reaches the mTLS listener, with a certificate made on the spot. Raises LocalBrokerError."""
        state = self.state()
        if state is None:
            raise LocalBrokerError(f"{self.home} was never started", mend="`draftloop broker up` first")
        tls = self.home / "tls"
        certificate, key = tls / f"{Path(principal).name}.pem", tls / f"{Path(principal).name}.key"
        if days_left(certificate) < RENEW_DAYS or not key.exists():
            certificate_pem, key_pem = Authority.at(tls).client(principal)
            write_private(key, key_pem)
            write_private(certificate, certificate_pem)
        security = KafkaSecurity(protocol="SSL", ca_file=tls / "ca.pem", cert_file=certificate, key_file=key)
        return KafkaConfig(bootstrap=(state.mtls_bootstrap,), cluster_id=state.cluster_id, security=security)

    def _claim(self) -> None:
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.listdir(self.home)
        except OSError as error:
            raise LocalBrokerError(f"{self.home} cannot be a home: {error}", mend="give another --home") from error
        if found and MARKER not in found and not (self.home / MARKER).exists():
            raise LocalBrokerError(
                f"{self.home} is not empty and not a broker's home (it holds {sorted(found)[0]!r})",
                mend="give --home a folder of its own",
            )
        if "," in str(self.home):
            raise LocalBrokerError(f"{self.home}: Kafka takes ',' for the end of a path", mend="give another --home")
        self.home.chmod(0o700)

    @contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        while True:
            held = lease(self.home / MARKER, what="draftloop broker up/down")
            try:
                held.__enter__()
                break
            except LeaseHeldError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)
        try:
            yield
        finally:
            held.__exit__(None, None, None)

    def _start(
        self, before: BrokerState | None, libs: Path | None, tell: Callable[[str], None]
    ) -> tuple[BrokerState, int]:
        jars = self._jars(before, libs)
        java = find_java(os.environ)
        ports = free_ports(before.ports if before else None)
        self._certify()
        properties = self.home / "server.properties"
        write_private(properties, properties_text(server_properties(self.home, ports)).encode())
        class_path = ("-cp", f"{jars}/*")
        cluster_id = self._cluster_id()
        if cluster_id is None:
            cluster_id = base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
            tell("formatting the data folder")
            arguments = [*_JVM_FLAGS, *class_path, "kafka.tools.StorageTool", "format", "--ignore-formatted"]
            done = run_java(java, [*arguments, "-t", cluster_id, "-c", str(properties)], timeout_s=FORMAT_TIMEOUT_S)
            if done.returncode:
                raise LocalBrokerError(
                    f"Kafka could not format {self.home / 'data'}: {_quoted(done.stdout.splitlines())}",
                    mend="check disk space and the folder's rights",
                )
        log = self.home / "server.log"
        if self._log_size() > MAX_LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
        offset = self._log_size()
        crash = f"-XX:ErrorFile={self.home}/jvm-crash.log"
        process = spawn_java(java, [*_JVM_FLAGS, crash, *class_path, "kafka.Kafka", str(properties)], log=log)
        state = BrokerState(
            pid=process.pid,
            started=process.started,
            cluster_id=cluster_id,
            bootstrap=f"{HOST}:{ports.sasl}",
            mtls_bootstrap=f"{HOST}:{ports.mtls}",
            controller=f"{HOST}:{ports.controller}",
            libs=str(jars),
        )
        write_private(self.home / "broker.json", msgspec.json.encode(state))
        self._readdress(before, state)
        return state, offset

    def _jars(self, before: BrokerState | None, libs: Path | None) -> Path:
        try:
            return find_libs(libs, os.environ)
        except KafkaJarsNotFoundError:
            if libs is not None or before is None:
                raise
            return find_libs(Path(before.libs), {})  # those it ran with

    def _certify(self) -> None:
        tls = self.home / "tls"
        tls.mkdir(mode=0o700, exist_ok=True)
        authority = Authority.at(tls)
        hosts = ("localhost", HOST)
        if days_left(tls / "node.pem") < RENEW_DAYS:
            certificate, key = authority.node(NODE_NAME, hosts=hosts)
            write_private(tls / "node.pem", key + certificate + authority.certificate_file.read_bytes())
        if days_left(tls / "controller.pem") < RENEW_DAYS or not (tls / "controller-only.pem").exists():
            certificate, key = self_signed(NODE_NAME, hosts=hosts)
            write_private(tls / "controller-only.pem", certificate)
            write_private(tls / "controller.pem", key + certificate)

    def _cluster_id(self) -> str | None:
        try:
            text = (self.home / "data" / "meta.properties").read_text()
        except FileNotFoundError:
            return None
        found = re.search(r"^cluster\.id=(\S+)$", text, re.MULTILINE)
        if found is None:
            raise LocalBrokerError(
                f"{self.home / 'data'} holds a damaged meta.properties", mend="move the data folder away"
            )
        return found[1]

    def _readdress(self, before: BrokerState | None, state: BrokerState) -> None:
        if before is None or before.bootstrap == state.bootstrap:
            return
        moved = {before.bootstrap: state.bootstrap, before.mtls_bootstrap: state.mtls_bootstrap}
        for file in sorted((self.home / "clients").glob("*.toml")):
            config = read_client(file)
            bootstrap = tuple(moved.get(address, address) for address in config.bootstrap)
            write_client(file, config.model_copy(update={"bootstrap": bootstrap}))

    def _wait_until_ready(
        self, state: BrokerState, deadline: float, tell: Callable[[str], None], *, offset: int
    ) -> None:
        began = time.monotonic()
        while not _answers(state.ports.mtls):
            if not runs(state.process):
                raise LocalBrokerError(
                    f"Kafka ended while starting: {_quoted(self._log_lines(offset))}",
                    mend=f"the whole log is {self.home / 'server.log'}",
                )
            if time.monotonic() > deadline:
                raise LocalBrokerError(
                    f"Kafka (process {state.pid}) does not answer on {state.mtls_bootstrap}"
                    f" after {time.monotonic() - began:.0f} s: {_quoted(self._log_lines(offset))}",
                    mend=f"wait longer, or `draftloop broker down --home {self.home}` and start it again",
                )
            tell(f"waiting for Kafka: {time.monotonic() - began:.0f} s")
            time.sleep(POLL_S)
        self._admit_admin(state)

    def _admit_admin(self, state: BrokerState) -> None:
        from draftloop.pipeline.stream.kafka_users import set_scram_password

        file = self.home / "secrets" / f"{ADMIN_NAME}.password"
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if not file.exists():
            write_private(file, secrets.token_urlsafe(32).encode() + b"\n")
        security = KafkaSecurity(username=ADMIN_NAME, password_file=file, ca_file=self.home / "tls" / "ca.pem")
        (self.home / "clients").mkdir(mode=0o700, exist_ok=True)
        config = KafkaConfig(bootstrap=(state.bootstrap,), cluster_id=state.cluster_id, security=security)
        write_client(self.home / "clients" / f"{ADMIN_NAME}.toml", config)
        set_scram_password(self.certified(ADMIN_NAME), ADMIN_NAME, security.password())

    def _log_size(self) -> int:
        try:
            return (self.home / "server.log").stat().st_size
        except FileNotFoundError:
            return 0

    def _log_lines(self, offset: int) -> list[str]:
        try:
            with (self.home / "server.log").open("rb") as stream:
                stream.seek(max(offset, self._log_size() - 2**20))
                return stream.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []


def _answers(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def _quoted(lines: list[str]) -> str:
    told = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("at ")]
    return " | ".join(told[-QUOTED_LINES:]) or "it said nothing"

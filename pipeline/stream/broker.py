"""A real Apache Kafka on this machine, for development and tests: one node in a folder of its own.

Everything it needs and leaves is under its home: certificates, passwords, data, log, how to reach it. No password is
on a command line, in Kafka's settings or in a log: the node talks to itself by certificate, and the administrator's
password is set over a connection with the administrator's certificate.
"""

from __future__ import annotations

import base64
import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from draftloop.pipeline.errors import (
    AuthenticationError,
    BrokerUnreachableError,
    KafkaJarsNotFoundError,
    LeaseHeldError,
    LocalBrokerError,
    TlsError,
)
from draftloop.pipeline.lease import lease
from draftloop.pipeline.stream.broker_home import (
    MARKER,
    Listeners,
    certified,
    certify,
    claim,
    cluster_of,
    furnish,
    readdress,
    require_ours,
)
from draftloop.pipeline.stream.broker_jars import fetch, find_libs
from draftloop.pipeline.stream.broker_java import (
    FORMAT_MAIN,
    KAFKA_MAIN,
    ProcessIdentity,
    find_java,
    java_of,
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
    Ports,
    free_ports,
    properties_text,
    server_properties,
)
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity, read_client, write_client
from draftloop.pipeline.stream.private_files import make_private, not_ours, write_private

__all__ = ["BrokerState", "LocalBroker", "fetch", "find_java", "find_libs"]

Tell = Callable[[str], None]

FORMAT_TIMEOUT_S = 60.0
POLL_S = 0.1
TELL_EVERY_S = 5.0
ADMITTED_WITHIN_S = 15.0  # a password set is known to the login a moment later
GIVE_UP_S = 2.0  # for a clean end of a broker that did not come up
LET_GO_S = 5.0  # within which an `up` notices that its broker has ended
LEFT_BEHIND_S = 10.0
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
    "-Dlog4j2.level=WARN",  # where the jars of $KAFKA_HOME bring log4j instead
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
    def listeners(self) -> Listeners:
        return Listeners(self.cluster_id, self.bootstrap, self.mtls_bootstrap)

    @property
    def ports(self) -> Ports:
        addresses = (self.bootstrap, self.mtls_bootstrap, self.controller)
        return Ports(*(int(address.rpartition(":")[2]) for address in addresses))


class LocalBroker:
    """One Apache Kafka node whose home is `home`. Safe to use from several processes at once."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self._log = self.home / "server.log"

    def up(self, *, libs: Path | None, wait_s: float = 60, on_wait: Tell | None = None) -> BrokerState:
        """Start the broker, or find it running, and return when the administrator can log in.

        Raises LocalBrokerError (JavaNotFoundError, KafkaJarsNotFoundError) and leaves nothing running of what it
        started; LeaseHeldError where another process is starting or stopping it all the while.
        """
        deadline = time.monotonic() + wait_s
        claim(self.home)
        with self._alone(deadline):
            try:
                return self._up(libs, deadline, on_wait or (lambda _: None))
            except OSError as error:
                raise LocalBrokerError(
                    f"{self.home}: {error}", mend="check disk space and the folder's rights"
                ) from error

    def down(self, *, wait_s: float = 30) -> bool:
        """Stop whatever runs of this home, also what an `up` is starting or left behind; what it keeps stays.

        False: nothing ran. Raises LocalBrokerError; LeaseHeldError where another process starts it all the while.
        """
        if not (self.home / MARKER).exists():
            return False
        stopped: list[bool] = []

        def stop_all() -> None:
            stopped.extend(stop(process, wait_s=wait_s) for process in self._processes())

        # An `up` that waits for its broker lets go of the home only when the broker ends.
        with self._alone(time.monotonic() + wait_s + LET_GO_S, meanwhile=stop_all):
            stop_all()
        return any(stopped)

    def state(self) -> BrokerState | None:
        """What broker.json says, whether it runs or not; None where it was never started. Raises LocalBrokerError."""
        file = self.home / "broker.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=BrokerState)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise LocalBrokerError(
                f"{file} cannot be read: {error}",
                mend=f"`draftloop broker down --home {self.home}`, then delete the file; data and passwords stay",
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
        config = certified(self.home, principal, state.mtls_bootstrap)
        return config.model_copy(update={"cluster_id": state.cluster_id})

    def certificates(self) -> Path:
        """The tls folder for a Kafka that something else starts, a container for one. Raises LocalBrokerError."""
        claim(self.home)
        with self._alone(time.monotonic()):
            furnish(self.home)
            certify(self.home)
            certified(self.home, ADMIN_NAME, f"{HOST}:0")
        return self.home / "tls"

    def admit(self, *, bootstrap: str, mtls_bootstrap: str) -> KafkaConfig:
        """Give the administrator a password on a running Kafka that trusts our CA, and write clients/admin.toml.

        Where the password in secrets/ is good already nothing is changed. Raises LocalBrokerError, BrokerError.
        """
        from draftloop.pipeline.stream.kafka_admin import KafkaAdmin
        from draftloop.pipeline.stream.kafka_connect import probe

        require_ours(self.home)
        by_certificate = certified(self.home, ADMIN_NAME, mtls_bootstrap)
        cluster_id = probe(by_certificate).cluster_id
        file = self.home / "secrets" / f"{ADMIN_NAME}.password"
        make_private(file.parent)
        if not file.exists():
            write_private(file, secrets.token_urlsafe(32).encode() + b"\n")
        security = KafkaSecurity(username=ADMIN_NAME, password_file=file, ca_file=self.home / "tls" / "ca.pem")
        config = KafkaConfig(bootstrap=(bootstrap,), cluster_id=cluster_id, security=security)
        deadline = time.monotonic() + ADMITTED_WITHIN_S
        unset = True
        while True:
            try:
                probe(config)
                break
            except AuthenticationError:
                if time.monotonic() > deadline:
                    raise
                if unset:
                    with KafkaAdmin(by_certificate) as cluster:
                        cluster.set_password(ADMIN_NAME, security.password())
                    unset = False
                time.sleep(POLL_S)
        write_client(self.home / "clients" / f"{ADMIN_NAME}.toml", config)
        return config

    @contextmanager
    def _alone(self, deadline: float, *, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
        """The home to ourselves for the block. meanwhile: done again and again while another has it."""
        while True:
            held = lease(self.home / MARKER, what="`draftloop broker`")
            try:
                held.__enter__()
                break
            except LeaseHeldError:
                if time.monotonic() > deadline:
                    raise
                meanwhile()
                time.sleep(POLL_S)
        try:
            yield
        finally:
            held.__exit__(None, None, None)

    def _processes(self) -> list[ProcessIdentity]:
        """All that runs of this home: what is known of, and what a start that was killed left before it was."""
        found = java_of(self.home / "server.properties")
        try:
            # Whoever can write broker.json chooses which process of ours ends.
            if not_ours(self.home) or not_ours(self.home / "broker.json"):
                return found
            state = self.state()
        except FileNotFoundError:
            return found
        except LocalBrokerError:
            if not found:
                raise
            return found
        if state is not None and runs(state.process) and state.process not in found:
            found.append(state.process)
        return found

    def _up(self, libs: Path | None, deadline: float, tell: Tell) -> BrokerState:
        before = self.state()
        furnish(self.home)
        if before is not None and runs(before.process):
            readdress(self.home, before.listeners, tell)
            self._wait_until_ready(before, deadline, tell, offset=self._log_size())
            return before
        for process in self._processes():
            tell(f"stopping process {process.pid}, which a start that was killed left behind")
            stop(process, wait_s=LEFT_BEHIND_S)
        jars = self._jars(before, libs)
        java = find_java(os.environ)
        ports = free_ports(before.ports if before else None)
        certify(self.home)
        properties = self.home / "server.properties"
        write_private(properties, properties_text(server_properties(self.home, ports)).encode())
        cluster_id = cluster_of(self.home) or self._format(java, jars, properties, tell)
        if self._log_size() > MAX_LOG_BYTES:
            self._log.replace(self._log.with_suffix(".log.1"))
        offset = self._log_size()
        crash = f"-XX:ErrorFile={str(self.home).replace('%', '%%')}/jvm-crash.log"
        process = spawn_java(java, [*_JVM_FLAGS, crash, "-cp", f"{jars}/*", KAFKA_MAIN, str(properties)], log=self._log)
        try:
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
            readdress(self.home, state.listeners, tell)
            self._wait_until_ready(state, deadline, tell, offset=offset)
        except BaseException:
            stop(process, wait_s=GIVE_UP_S)
            raise
        return state

    def _jars(self, before: BrokerState | None, libs: Path | None) -> Path:
        try:
            return find_libs(libs, os.environ)
        except KafkaJarsNotFoundError:
            if libs is not None or before is None:
                raise
            return find_libs(Path(before.libs), {})  # those it ran with

    def _format(self, java: Path, jars: Path, properties: Path, tell: Tell) -> str:
        tell("formatting the data folder")
        # Kafka's own form of an id; a leading '-' would read as an option of its tools.
        cluster_id = base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        arguments = [FORMAT_MAIN, "format", "--ignore-formatted", "-t", cluster_id, "-c", str(properties)]
        done = run_java(java, [*_JVM_FLAGS, "-cp", f"{jars}/*", *arguments], timeout_s=FORMAT_TIMEOUT_S)
        if done.returncode:
            raise LocalBrokerError(
                f"Kafka could not format {self.home / 'data'}: {_quoted(done.stdout.splitlines())}",
                mend="check disk space and the folder's rights",
            )
        return cluster_id

    def _wait_until_ready(self, state: BrokerState, deadline: float, tell: Tell, *, offset: int) -> None:
        from draftloop.pipeline.stream.kafka_connect import probe

        config = self.certified(ADMIN_NAME).model_copy(update={"connect_timeout_s": 3.0})
        began = told = time.monotonic()
        tell(f"waiting for Kafka on {state.bootstrap}")
        while True:
            try:
                if probe(config).num_brokers:
                    break
                why = "it knows no broker yet"
            except (BrokerUnreachableError, TlsError) as error:
                why = error.message
            now = time.monotonic()
            if not runs(state.process):
                raise LocalBrokerError(
                    f"Kafka ended while starting: {_quoted(self._log_lines(offset))}", mend=f"read {self._log}"
                )
            if now > deadline:
                raise LocalBrokerError(
                    f"Kafka (process {state.pid}) is not ready after {now - began:.0f} s: {why};"
                    f" its log: {_quoted(self._log_lines(offset))}",
                    mend=f"wait longer, or `draftloop broker down --home {self.home}` and start it again",
                )
            if now - told > TELL_EVERY_S:
                tell(f"waiting for Kafka: {now - began:.0f} s")
                told = now
            time.sleep(POLL_S)
        self.admit(bootstrap=state.bootstrap, mtls_bootstrap=state.mtls_bootstrap)

    def _log_size(self) -> int:
        try:
            return self._log.stat().st_size
        except FileNotFoundError:
            return 0

    def _log_lines(self, offset: int) -> list[str]:
        try:
            with self._log.open("rb") as stream:
                stream.seek(max(offset, self._log_size() - 2**20))
                return stream.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []


def _quoted(lines: list[str]) -> str:
    told = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("at ")]
    return " | ".join(told[-QUOTED_LINES:]) or "it said nothing"

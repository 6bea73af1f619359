"""The local Apache Kafka: starts, keeps, recovers, stops only its own, and lets nobody in who should not be."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from draftloop.pipeline.cli_stream import broker_app
from draftloop.pipeline.errors import AuthenticationError, BrokerUnreachableError, LocalBrokerError
from draftloop.pipeline.stream import broker as broker_module
from draftloop.pipeline.stream.broker import LocalBroker, find_libs
from draftloop.pipeline.stream.broker_java import find_java, java_of, run_java, runs, spawn_java, stop
from draftloop.pipeline.stream.broker_settings import NODE_NAME, free_ports
from draftloop.pipeline.stream.kafka_config import KafkaConfig, read_client, write_client
from draftloop.pipeline.stream.private_files import write_private

API_VERSIONS, METADATA = 18, 3
COMPOSE = Path(__file__).parents[2] / "configs" / "deploy" / "compose.yaml"


def kafka_answers(address: str, *, api: int = API_VERSIONS, context: ssl.SSLContext | None = None) -> bool:
    """Whether a Kafka request sent by hand is answered; False where the connection is closed or the handshake fails."""
    request = struct.pack(">hhih", api, 1 if api == METADATA else 0, 7, 0) + (b"\xff" * 4 if api == METADATA else b"")
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        try:
            stream = context.wrap_socket(plain, server_hostname=host) if context else plain
            stream.sendall(struct.pack(">i", len(request)) + request)
            head = stream.recv(8)
        except (ssl.SSLError, ConnectionError):
            return False
        finally:
            if context and "stream" in locals():
                stream.close()
    return len(head) == 8 and struct.unpack(">i", head[4:])[0] == 7


def tls(ca: Path, *pair: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if pair:
        context.load_cert_chain(*pair)
    return context


def wait_for_port(address: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", int(address.split(":")[1])), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"nothing listens on {address}")


def make_topic(config: KafkaConfig, name: str, *values: bytes) -> None:
    from kafka import KafkaProducer
    from kafka.admin import KafkaAdminClient

    from draftloop.pipeline.stream.kafka_connect import client_options

    with KafkaAdminClient(**client_options(config)) as client:
        client.create_topics({name: {"num_partitions": 1, "replication_factor": 1}})
    with KafkaProducer(**client_options(config)) as producer:
        for value in values:
            producer.send(name, value).get(timeout=20)


def read_topic(config: KafkaConfig, name: str, count: int) -> list[bytes]:
    from kafka import KafkaConsumer, TopicPartition

    from draftloop.pipeline.stream.kafka_connect import client_options

    with KafkaConsumer(**client_options(config), consumer_timeout_ms=20_000) as consumer:
        consumer.assign([TopicPartition(name, 0)])
        consumer.seek_to_beginning()
        return [record.value for _, record in zip(range(count), consumer, strict=False)]


def topics_seen(config: KafkaConfig) -> list[str]:
    from kafka.admin import KafkaAdminClient

    from draftloop.pipeline.stream.kafka_connect import client_options

    with KafkaAdminClient(**client_options(config)) as client:
        return list(client.list_topics())


@contextmanager
def taken(address: str) -> Iterator[None]:
    """Somebody else listens there for the block."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", int(address.split(":")[1])))
        other.listen()
        yield


def test_up_answers_with_where_it_listens_and_a_second_up_finds_it_running(broker: LocalBroker) -> None:
    first = broker.state()
    assert first is not None
    assert broker.up(libs=None) == first
    status = broker.status()
    assert (status["running"], status["pid"], status["bootstrap"]) == (True, first.pid, first.bootstrap)
    assert 50 < status["rss_mb"] < 2000
    assert 0 < status["uptime_s"] < 3600
    assert broker.client("admin").cluster_id == first.cluster_id


def test_a_terminals_interrupt_does_not_reach_it(broker: LocalBroker) -> None:
    state = broker.state()
    assert state is not None
    assert os.getsid(state.pid) == state.pid


def test_it_listens_on_the_loopback_address_alone(broker: LocalBroker) -> None:
    state = broker.state()
    assert state is not None
    ports = {f"{port:04X}" for port in state.ports}
    rows = [
        line.split()[1] for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    ours = [row.split(":")[0] for row in rows[1:] if row.split(":")[-1] in ports]
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert ours
    assert set(ours) <= loopback


def test_the_controllers_port_takes_the_nodes_certificate_and_no_other(broker: LocalBroker) -> None:
    state = broker.state()
    assert state is not None
    folder = broker.home / "tls"
    ours = folder / "controller-only.pem"
    broker.certified("stranger")
    assert kafka_answers(state.controller) is False, "plain text"
    assert kafka_answers(state.controller, context=tls(ours)) is False, "TLS without a certificate"
    for name in ("stranger", "admin"):
        pair = (folder / f"{name}.pem", folder / f"{name}.key")
        assert kafka_answers(state.controller, context=tls(ours, *pair)) is False, f"{name}'s certificate"
    assert kafka_answers(state.controller, context=tls(ours, folder / "node.pem")) is False, (
        "the listeners' certificate"
    )
    assert kafka_answers(state.controller, context=tls(ours, folder / "controller.pem")) is True


def test_who_does_not_log_in_gets_nothing(broker: LocalBroker) -> None:
    state = broker.state()
    assert state is not None
    ca = broker.home / "tls" / "ca.pem"
    for address in (state.bootstrap, state.mtls_bootstrap):
        assert kafka_answers(address) is False, "plain text"
    assert kafka_answers(state.mtls_bootstrap, context=tls(ca)) is False, "no certificate"
    assert kafka_answers(state.bootstrap, api=METADATA, context=tls(ca)) is False, "no login"
    admin = (broker.home / "tls" / "admin.pem", broker.home / "tls" / "admin.key")
    assert kafka_answers(state.mtls_bootstrap, api=METADATA, context=tls(ca, *admin)) is True


def test_who_logs_in_without_an_acl_sees_and_makes_no_topic(broker: LocalBroker, admin: KafkaConfig) -> None:
    from kafka.errors import AuthorizationError

    make_topic(admin, "local-broker.unseen")
    stranger = broker.certified("stranger")
    assert "local-broker.unseen" in topics_seen(admin)
    assert topics_seen(stranger) == []
    with pytest.raises(AuthorizationError):
        make_topic(stranger, "local-broker.made")


def test_a_record_of_four_mebibytes_fits(admin: KafkaConfig) -> None:
    from kafka import KafkaProducer

    from draftloop.pipeline.stream.kafka_connect import client_options

    make_topic(admin, "local-broker.large")
    with KafkaProducer(**client_options(admin), max_request_size=8 * 2**20) as producer:
        assert producer.send("local-broker.large", os.urandom(4 * 2**20)).get(timeout=20).offset == 0


def test_down_and_up_keep_data_and_passwords_and_move_from_ports_that_were_taken(own_broker: LocalBroker) -> None:
    from draftloop.pipeline.stream.kafka_connect import probe

    before, admin = own_broker.state(), own_broker.client("admin")
    assert before is not None
    password = (own_broker.home / "secrets" / "admin.password").read_text()
    make_topic(admin, "kept", b"one", b"two")
    assert own_broker.down() is True
    assert own_broker.down() is False
    assert own_broker.status()["running"] is False
    with pytest.raises(BrokerUnreachableError):
        probe(admin)
    with taken(before.mtls_bootstrap):
        after = own_broker.up(libs=None)
    assert after.cluster_id == before.cluster_id
    assert not set(after.ports) & set(before.ports)
    assert (own_broker.home / "secrets" / "admin.password").read_text() == password
    assert own_broker.client("admin").bootstrap == (after.bootstrap,)
    assert read_topic(own_broker.client("admin"), "kept", 2) == [b"one", b"two"]
    own_broker.down()
    assert own_broker.up(libs=None).ports == after.ports


def test_after_kill_9_up_recovers_what_was_acknowledged(own_broker: LocalBroker) -> None:
    state, admin = own_broker.state(), own_broker.client("admin")
    assert state is not None
    make_topic(admin, "kept", b"one", b"two")
    os.kill(state.pid, signal.SIGKILL)
    while runs(state.process):
        time.sleep(0.01)
    assert own_broker.status()["running"] is False
    again = own_broker.up(libs=None)
    assert (again.pid != state.pid, again.ports) == (True, state.ports)
    assert read_topic(admin, "kept", 2) == [b"one", b"two"]


def test_down_stops_its_own_broker_alone_even_when_it_is_frozen(own_broker: LocalBroker, broker: LocalBroker) -> None:
    ours, others = own_broker.state(), broker.state()
    assert ours is not None
    assert others is not None
    os.kill(ours.pid, signal.SIGSTOP)
    assert own_broker.down(wait_s=10) is True
    assert not runs(ours.process)
    assert runs(others.process)
    assert kafka_answers(others.bootstrap, context=tls(broker.home / "tls" / "ca.pem")) is True


@pytest.fixture
def watched_commands() -> Iterator[dict[str, None]]:
    """Every command line and environment of every process while the test runs, sampled all the time."""
    seen: dict[str, None] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for kind in ("cmdline", "environ"):
                for file in Path("/proc").glob(f"[0-9]*/{kind}"):
                    try:
                        seen[file.read_bytes().decode(errors="replace")] = None
                    except OSError:
                        continue
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    over.set()
    thread.join()


def test_no_password_is_in_a_process_list_a_log_a_setting_or_on_the_screen(
    kafka_libs: Path,
    tmp_path: Path,
    watched_commands: dict[str, None],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    own = LocalBroker(tmp_path / "ein Zuhause für #1: 100 % = ja")
    told: list[str] = []
    try:
        own.up(libs=kafka_libs, on_wait=told.append)
        make_topic(own.client("admin"), "x", b"1")
    finally:
        own.down()
    password = (own.home / "secrets" / "admin.password").read_text().strip()
    assert len(password) >= 43
    printed = "".join(capfd.readouterr())
    open_files = [own.home / name for name in ("server.log", "server.properties", "broker.json", "clients/admin.toml")]
    data = [file for file in (own.home / "data").rglob("*") if file.is_file()]
    commands = "\n".join(watched_commands)
    assert "kafka.tools.StorageTool" in commands, "the watch saw the short-lived process too"
    assert "kafka.Kafka" in commands
    assert "SCRAM" not in commands
    assert password not in commands
    assert password not in printed + caplog.text + "".join(told)
    for file in open_files + data:
        assert password.encode() not in file.read_bytes(), file


def test_only_the_owner_reads_anything_of_a_home(broker: LocalBroker) -> None:
    broker.certified("stranger")
    assert stat.S_IMODE(broker.home.stat().st_mode) == 0o700
    named = [broker.home / name for name in ("broker.json", "server.properties", "server.log", ".draftloop-broker")]
    inside = [file for name in ("tls", "secrets", "clients") for file in (broker.home / name).iterdir()]
    assert len(inside) >= 9
    assert {str(file): stat.S_IMODE(file.stat().st_mode) for file in named + inside} == dict.fromkeys(
        map(str, named + inside), 0o600
    )


def test_two_ups_at_once_start_one_broker_and_an_interrupted_up_leaves_none(kafka_libs: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"

    def interrupt(text: str) -> None:
        if text.startswith("waiting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalBroker(home).up(libs=kafka_libs, on_wait=interrupt)
    state = LocalBroker(home).state()
    assert state is not None
    assert not runs(state.process)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: LocalBroker(home).up(libs=kafka_libs), range(3)))
    try:
        assert len({state.pid for state in found}) == 1
    finally:
        assert LocalBroker(home).down() is True


def test_a_lost_or_changed_admin_password_is_set_anew_by_the_next_up(own_broker: LocalBroker) -> None:
    from draftloop.pipeline.stream.kafka_connect import probe

    old = own_broker.client("admin")
    (own_broker.home / "secrets" / "admin.password").unlink()
    (own_broker.home / "clients" / "admin.toml").unlink()
    own_broker.up(libs=None)
    probe(own_broker.client("admin"))
    wrong = own_broker.home / "wrong"
    wrong.write_text("not it")
    wrong.chmod(0o600)
    assert old.security is not None
    with pytest.raises(AuthenticationError):
        probe(old.model_copy(update={"security": old.security.model_copy(update={"password_file": wrong})}))


def test_the_settings_of_the_compose_file_run_with_certificates_made_for_it_and_admit_its_administrator(
    kafka_libs: Path, tmp_path: Path
) -> None:
    from draftloop.pipeline.stream.kafka_connect import probe

    own = LocalBroker(tmp_path / "home")
    assert own.certificates() == own.home / "tls"
    ports = free_ports(None)
    content: str = yaml.safe_load(COMPOSE.read_text())["configs"]["server_properties"]["content"]
    content = content.replace("/var/lib/kafka", str(own.home)).replace("0.0.0.0", "127.0.0.1").replace("$$", "$")
    for port, ours in zip((9092, 9094, 9093), ports, strict=True):
        content = content.replace(f":{port}", f":{ours}")
    settings = own.home / "compose.properties"
    settings.write_text(content)
    java, quiet = find_java(os.environ), "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    tool = [quiet, "-cp", f"{kafka_libs}/*", "kafka.tools.StorageTool", "format"]
    done = run_java(java, [*tool, "-t", "AAAAAAAAAAAAAAAAAAAAAQ", "-c", str(settings)], timeout_s=60)
    assert done.returncode == 0, done.stdout
    node = spawn_java(
        java, [quiet, "-cp", f"{kafka_libs}/*", "kafka.Kafka", str(settings)], log=own.home / "server.log"
    )
    sasl, mtls = f"127.0.0.1:{ports.sasl}", f"127.0.0.1:{ports.mtls}"
    try:
        wait_for_port(mtls)
        config = own.admit(bootstrap=sasl, mtls_bootstrap=mtls)
        assert probe(own.client("admin")) == ("AAAAAAAAAAAAAAAAAAAAAQ", 1, probe(config).release)
        assert own.admit(bootstrap=sasl, mtls_bootstrap=mtls) == config
    finally:
        assert stop(node, wait_s=20) is True


def test_a_broker_that_cannot_start_is_told_with_its_own_words(own_broker: LocalBroker) -> None:
    own_broker.down()
    meta = own_broker.home / "data" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=2"))
    with pytest.raises(LocalBrokerError, match=r"Kafka ended while starting: .*Stored node id 2"):
        own_broker.up(libs=None)
    assert own_broker.status()["running"] is False


def test_who_waits_too_short_a_time_is_told_and_nothing_is_left_running(kafka_libs: Path, tmp_path: Path) -> None:
    own = LocalBroker(tmp_path / "home")
    with pytest.raises(LocalBrokerError, match="is not ready after"):
        own.up(libs=kafka_libs, wait_s=0.1)
    assert own.status()["running"] is False


def test_no_user_can_be_made_that_the_node_would_be_taken_for(broker: LocalBroker, tmp_path: Path) -> None:
    """The node is a super user by the name in its certificate: whoever logs in by that name would be one too."""
    from draftloop.pipeline.stream.kafka_admin import KafkaAdmin
    from draftloop.pipeline.stream.kafka_connect import probe

    admin = broker.client("admin")
    assert admin.security is not None
    make_topic(admin, "local-broker.secret")
    secret = tmp_path / "password"
    write_private(secret, b"a-password-of-our-own")
    names = ("broker", "broker-node", "brokernode", "node", "controller", "ANONYMOUS", f"CN={NODE_NAME}", NODE_NAME)
    escaped = {name: name.replace("=", "=3D") for name in names}
    for name in names:
        with KafkaAdmin(admin) as cluster:
            cluster.set_password(name, secret.read_text())
        security = admin.security.model_copy(update={"username": escaped[name], "password_file": secret})
        config = admin.model_copy(update={"security": security})
        if name.isascii():
            deadline = time.monotonic() + 10
            while True:
                try:
                    probe(config)
                    break
                except AuthenticationError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            assert topics_seen(config) == [], name
        else:
            time.sleep(0.5)
            with pytest.raises((AuthenticationError, BrokerUnreachableError)):
                probe(config)
    assert topics_seen(broker.certified("broker")) == [], "a certificate of our CA for that name"


def test_a_half_written_client_file_keeps_no_broker_from_starting(own_broker: LocalBroker) -> None:
    from draftloop.pipeline.stream.kafka_connect import probe

    own_broker.down()
    for name in ("admin", "draftloop-hook"):
        (own_broker.home / "clients" / f"{name}.toml").write_text("[log.kafka")
    told: list[str] = []
    own_broker.up(libs=None, on_wait=told.append)
    assert [text for text in told if "draftloop-hook.toml" in text and "access apply" in text]
    assert probe(own_broker.client("admin")).num_brokers == 1


def test_a_start_killed_before_the_clients_were_told_is_mended_by_the_next(
    own_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def killed(*_: object) -> None:
        raise KilledError

    before, hook = own_broker.state(), own_broker.home / "clients" / "draftloop-hook.toml"
    assert before is not None
    write_client(hook, own_broker.client("admin"))
    own_broker.down()
    with taken(before.bootstrap), monkeypatch.context() as patch:
        patch.setattr(broker_module, "readdress", killed)
        with pytest.raises(KilledError):
            own_broker.up(libs=None)
    moved = own_broker.state()
    assert moved is not None
    assert moved.bootstrap != before.bootstrap
    assert read_client(hook).bootstrap == (before.bootstrap,)
    after = own_broker.up(libs=None)
    assert (after.ports, read_client(hook).bootstrap) == (moved.ports, (after.bootstrap,))
    write_client(hook, own_broker.client("admin").model_copy(update={"bootstrap": (before.bootstrap,)}))
    own_broker.up(libs=None)
    assert read_client(hook).bootstrap == (after.bootstrap,), "also where it runs already"


@pytest.mark.parametrize("moment", ["formatting", "waiting"])
def test_down_while_the_first_up_is_still_starting_leaves_nothing_running(
    kafka_libs: Path, tmp_path: Path, moment: str
) -> None:
    own = LocalBroker(tmp_path / "home")
    reached = threading.Event()

    def tell(text: str) -> None:
        if text.startswith(moment):
            reached.set()

    def up() -> str:
        try:
            own.up(libs=kafka_libs, on_wait=tell)
        except LocalBrokerError as error:
            return error.message
        return "it came up"

    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(up)
        assert reached.wait(30)
        time.sleep(0.3)
        assert LocalBroker(own.home).down() is True
        assert not java_of(own.home / "server.properties")
        assert "Kafka" in starting.result(timeout=30)
    assert own.status()["running"] is False
    assert own.down() is False


@pytest.mark.parametrize("harm", ["admin.toml", "password", "broker.json", "ca.pem"])
def test_the_command_down_stops_a_broker_whatever_is_wrong_with_its_files(own_broker: LocalBroker, harm: str) -> None:
    state, home = own_broker.state(), own_broker.home
    assert state is not None
    place = {"admin.toml": "clients/admin.toml", "password": "secrets/admin.password", "ca.pem": "tls/ca.pem"}
    (home / place.get(harm, harm)).write_text("")
    done = CliRunner().invoke(broker_app, ["down", "--home", str(home)])
    assert (done.exit_code, done.stdout) == (0, "stopped\n")
    assert "the stop is not on the audit topic" in done.stderr
    assert not runs(state.process)
    (home / "broker.json").unlink()


def test_what_a_start_killed_before_it_took_note_left_running_is_stopped_by_up_and_down(
    own_broker: LocalBroker,
) -> None:
    orphan = own_broker.state()
    assert orphan is not None
    (own_broker.home / "broker.json").unlink()
    told: list[str] = []
    after = own_broker.up(libs=find_libs(None, os.environ), on_wait=told.append)
    assert not runs(orphan.process)
    assert f"stopping process {orphan.pid}, which a start that was killed left behind" in told
    (own_broker.home / "broker.json").unlink()
    assert own_broker.down() is True
    assert not runs(after.process)


CLOCK_AHEAD = """
import sys, time
from pathlib import Path
now, now_ns = time.time, time.time_ns  # before kafka-python takes hold of them
time.time, time.time_ns = lambda: now() + 7200, lambda: now_ns() + 7200 * 10**9
from draftloop.pipeline.errors import DraftloopError
from draftloop.pipeline.stream.kafka_config import read_client
from draftloop.pipeline.stream.kafka_log import KafkaLog
from draftloop.pipeline.stream.log import LogEntry
log = KafkaLog(read_client(Path(sys.argv[1])))
for count in (1, 3):
    try:
        log.append(sys.argv[2], [LogEntry(b"k", b"v")] * count)
    except DraftloopError as error:
        print(type(error).__name__, error.reason, "max_ahead" in error.mend)
log.close()
"""


def test_a_clock_that_is_ahead_is_told_as_such(broker: LocalBroker) -> None:
    from kafka.admin import KafkaAdminClient

    from draftloop.pipeline.stream.kafka_connect import client_options

    topic, limit = "draftloop.local-broker-clock", {"message.timestamp.after.max.ms": "3600000"}
    with KafkaAdminClient(**client_options(broker.client("admin"))) as client:
        client.create_topics({topic: {"num_partitions": 1, "replication_factor": 1, "configs": limit}})
    words = [sys.executable, "-c", CLOCK_AHEAD, str(broker.home / "clients" / "admin.toml"), topic]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONSAFEPATH": "1"}, timeout=60
    )
    assert done.stdout.splitlines() == ["ClockError clock True"] * 2, "alone, and of several in one batch"

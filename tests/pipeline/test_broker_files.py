"""The local broker without a broker: its settings, its files, Java, jars, and which process is its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from draftloop.pipeline.errors import JavaNotFoundError, KafkaJarsNotFoundError, LocalBrokerError
from draftloop.pipeline.lease import lease
from draftloop.pipeline.stream import broker_jars
from draftloop.pipeline.stream.broker import BrokerState, LocalBroker, fetch, find_java, find_libs
from draftloop.pipeline.stream.broker_home import MARKER, Listeners, claim, cluster_of, furnish, readdress
from draftloop.pipeline.stream.broker_java import ProcessIdentity, java_of, runs, spawn_java, started_at, stop
from draftloop.pipeline.stream.broker_settings import (
    NODE_NAME,
    PORT_RANGE,
    Ports,
    free_ports,
    properties_text,
    server_properties,
)
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity, read_client, write_client
from draftloop.pipeline.stream.private_files import write_private

DEPLOY = Path(__file__).parents[2] / "configs" / "deploy"


def script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def jars(folder: Path, version: str = "4.3.1") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (f"kafka_2.13-{version}.jar", f"kafka-clients-{version}.jar", "kafka_2.13-4.3.1-sources.jar"):
        (folder / name).touch()
    return folder


def read_properties(data: bytes) -> dict[str, str]:
    """As Java reads them."""

    def plain(text: str) -> str:
        units = re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text)
        return units.encode("utf-16-be", "surrogatepass").decode("utf-16-be")

    pairs = (line.partition("=") for line in data.decode("latin-1").split("\n") if line)
    return {plain(key): plain(value.lstrip(" \t\f")) for key, _, value in pairs}


# Settings


def test_every_listener_authenticates_and_nothing_is_allowed_without_an_acl() -> None:
    settings = server_properties(Path("/home"), Ports(1, 2, 3))
    assert settings["listeners"] == "SASL_SSL://127.0.0.1:1,SSL://127.0.0.1:2,CONTROLLER://127.0.0.1:3"
    assert settings["listener.security.protocol.map"] == "SASL_SSL:SASL_SSL,SSL:SSL,CONTROLLER:SSL"
    assert settings["listener.name.ssl.ssl.client.auth"] == "required"
    assert settings["listener.name.controller.ssl.client.auth"] == "required"
    assert settings["sasl.enabled.mechanisms"] == "SCRAM-SHA-512"
    assert settings["authorizer.class.name"].endswith(".StandardAuthorizer")
    assert settings["allow.everyone.if.no.acl.found"] == "false"
    assert settings["super.users"] == f"User:admin;User:{NODE_NAME}"
    assert not NODE_NAME.isascii(), "Kafka takes only ASCII for a name that logs in by SCRAM"
    assert settings["auto.create.topics.enable"] == "false"
    assert int(settings["message.max.bytes"]) > 4 * 2**20
    text = properties_text(settings)
    assert "PLAINTEXT" not in text
    assert "ANONYMOUS" not in text
    assert "password" not in text


@given(st.dictionaries(st.from_regex(r"[a-z.]{1,20}", fullmatch=True), st.text(st.characters(codec="utf-8"))))
def test_settings_survive_javas_way_of_reading_them(settings: dict[str, str]) -> None:
    text = properties_text(settings)
    assert text.isascii()
    assert read_properties(text.encode("ascii")) == settings


def test_ports_that_are_free_are_kept_and_others_stay_out_of_the_range_of_outgoing_connections() -> None:
    first = free_ports(None)
    assert len(set(first)) == 3
    assert set(first) <= set(PORT_RANGE)
    assert PORT_RANGE.stop <= 32768
    assert free_ports(first) == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", first.mtls))
        other.listen()
        assert first.mtls not in free_ports(first)


@pytest.fixture
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


def test_the_compose_file_gives_kafka_the_settings_of_the_local_broker(compose: dict[str, Any]) -> None:
    content = compose["configs"]["server_properties"]["content"].replace("$$", "$")
    found = read_properties(content.encode())
    wanted = server_properties(Path("/var/lib/kafka"), Ports(9092, 9094, 9093))
    assert found.pop("listeners") == "SASL_SSL://0.0.0.0:9092,SSL://0.0.0.0:9094,CONTROLLER://127.0.0.1:9093"
    wanted.pop("listeners")
    assert found == wanted


def test_the_compose_file_keeps_keys_and_ports_to_itself(compose: dict[str, Any]) -> None:
    (service,) = compose["services"].values()
    assert service["ports"] == ["127.0.0.1:9092:9092", "127.0.0.1:9094:9094"]
    mounted = [volume.rsplit(":", 2)[-2] for volume in service["volumes"] if volume.endswith(":ro")]
    assert mounted == [f"/var/lib/kafka/tls/{name}.pem" for name in ("ca", "node", "controller", "controller-only")]
    assert service["image"] == f"apache/kafka:{_pom_version()}"
    assert "password" not in yaml.safe_dump(service).lower()
    (command,) = service["command"]
    subprocess.run(["bash", "-n", "-c", command.replace("$$", "$")], check=True)


def _pom_version() -> str:
    found = re.search(r"<kafka.version>(.+)</kafka.version>", broker_jars.POM.read_text())
    assert found is not None
    return found[1]


def test_the_recipe_for_the_jars_is_one_file_in_the_package_and_in_configs() -> None:
    assert (DEPLOY / "pom.xml").resolve() == broker_jars.POM.resolve()


# Jars and Java


def test_jars_come_from_the_option_then_our_variable_then_kafka_home(tmp_path: Path) -> None:
    option, ours = jars(tmp_path / "option"), jars(tmp_path / "ours")
    jars(tmp_path / "dist" / "libs")
    both = {"DRAFTLOOP_KAFKA_LIBS": str(ours), "KAFKA_HOME": str(tmp_path / "dist")}
    assert find_libs(option, both) == option
    assert find_libs(None, both) == ours
    assert find_libs(None, {"KAFKA_HOME": str(tmp_path / "dist")}) == tmp_path / "dist" / "libs"


def test_missing_wrong_and_old_jars_are_told_with_every_way_to_get_them(tmp_path: Path) -> None:
    ways = r"(?s){}.*--libs DIR.*DRAFTLOOP_KAFKA_LIBS.*KAFKA_HOME.*draftloop broker fetch"
    (tmp_path / "empty").mkdir()
    with pytest.raises(KafkaJarsNotFoundError, match=ways.format("no folder with Kafka's jars was given")):
        find_libs(None, {})
    with pytest.raises(KafkaJarsNotFoundError, match=ways.format(f"--libs: {tmp_path}/empty holds no Kafka")):
        find_libs(tmp_path / "empty", {"DRAFTLOOP_KAFKA_LIBS": str(jars(tmp_path / "good"))})
    with pytest.raises(KafkaJarsNotFoundError, match=ways.format(r"\$KAFKA_HOME: .*/libs holds no Kafka")):
        find_libs(None, {"KAFKA_HOME": str(tmp_path / "empty")})
    with pytest.raises(KafkaJarsNotFoundError, match=ways.format("Kafka 3.9.0, which is too old")):
        find_libs(jars(tmp_path / "old", "3.9.0"), {})
    with pytest.raises(KafkaJarsNotFoundError, match="class path cannot hold"):
        find_libs(jars(tmp_path / "a:b"), {})


def test_java_home_is_taken_before_the_path(tmp_path: Path) -> None:
    home = script(tmp_path / "home" / "bin" / "java", "echo 'openjdk version \"21.0.2\"' >&2")
    path = script(tmp_path / "path" / "java", "echo 'openjdk version \"17\" 2021-09-14' >&2")
    assert find_java({"PATH": str(path.parent)}) == path
    assert find_java({"PATH": str(path.parent), "JAVA_HOME": str(tmp_path / "home")}) == home


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo 'openjdk version \"11.0.20\"' >&2", "is Java 11; Kafka needs 17"),
        ("echo 'java version \"1.8.0_372\"' >&2", "is Java 8; Kafka needs 17"),
        ("echo no such thing; exit 3", "ended with 3 and no version"),
    ],
)
def test_a_java_too_old_or_broken_is_told_with_the_mend(tmp_path: Path, text: str, told: str) -> None:
    script(tmp_path / "java", text)
    with pytest.raises(JavaNotFoundError, match=rf"(?s){told}.*mend: install a Java runtime of version 17"):
        find_java({"PATH": str(tmp_path)})


def test_no_java_is_told_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(JavaNotFoundError, match=r"(?s)no `java` on the path.*mend: install"):
        find_java({"PATH": str(tmp_path)})
    with pytest.raises(JavaNotFoundError, match=r"(?s)\$JAVA_HOME: .*/bin/java is not there.*mend: install"):
        find_java({"PATH": "/usr/bin", "JAVA_HOME": str(tmp_path)})


def test_fetch_runs_maven_on_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = jars(tmp_path / "repository")
    copy = f'for a; do case $a in -DoutputDirectory=*) d=${{a#*=}};; esac; done; mkdir -p "$d"; cp {good}/*.jar "$d"'
    script(tmp_path / "bin" / "mvn", f'echo "$@" > {tmp_path}/asked; test -f "$5" && {copy}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert fetch(tmp_path / "libs") == tmp_path / "libs"
    assert "dependency:copy-dependencies -DincludeScope=runtime" in (tmp_path / "asked").read_text()


def test_where_maven_is_missing_or_fails_fetch_says_what_else_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ways = r"(?s){}.*mend: .*--libs DIR.*DRAFTLOOP_KAFKA_LIBS.*KAFKA_HOME"
    with pytest.raises(KafkaJarsNotFoundError, match=ways.format("Maven .* is not on the path")):
        fetch(tmp_path / "libs")
    script(tmp_path / "mvn", "echo '[ERROR] Could not resolve'; exit 1")
    with pytest.raises(KafkaJarsNotFoundError, match=ways.format(r"Maven ended with 1: \[ERROR\] Could not resolve")):
        fetch(tmp_path / "libs")


# The home


def test_a_folder_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(LocalBrokerError, match=r"not empty \(it holds 'thesis.tex'\)"):
        LocalBroker(tmp_path).up(libs=None)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(LocalBrokerError, match="cannot be a broker's home"):
        claim(tmp_path / "thesis.tex")
    with pytest.raises(LocalBrokerError, match="end of a path"):
        claim(tmp_path / "a,b")
    assert LocalBroker(tmp_path).down() is False
    assert LocalBroker(tmp_path).status() == {"running": False, "home": str(tmp_path)}
    assert LocalBroker(tmp_path / "none").log_tail(5) == []


def test_a_damaged_broker_json_is_told_with_the_mend(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    for text in ("{", '{"pid": 1}', "[]", '{"pid": "1"}'):
        (tmp_path / "broker.json").write_text(text)
        for act in (LocalBroker(tmp_path).status, LocalBroker(tmp_path).down):
            with pytest.raises(LocalBrokerError, match=r"(?s)broker.json cannot be read.*mend: .*delete the file"):
                act()


def test_the_cluster_is_what_the_data_were_formatted_for(tmp_path: Path) -> None:
    assert cluster_of(tmp_path) is None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.properties").write_text("#\nnode.id=1\nversion=1\ncluster.id=ANaU1Ct5RROz2c0iF6mjOA\n")
    assert cluster_of(tmp_path) == "ANaU1Ct5RROz2c0iF6mjOA"
    (tmp_path / "data" / "meta.properties").write_text("\0\0\0")
    with pytest.raises(LocalBrokerError, match="is damaged: it names no cluster"):
        cluster_of(tmp_path)


CLIENTS = {
    # name -> addresses, cluster, protocol, and the addresses afterwards
    "moved": (("127.0.0.1:1",), "ours", "SASL_SSL", ("127.0.0.1:5",)),
    "long-lost": (("127.0.0.1:31999",), "ours", "SASL_SSL", ("127.0.0.1:5",)),
    "certificate": (("localhost:2",), "ours", "SSL", ("localhost:6",)),
    "unpinned": (("127.0.0.1:1",), None, "SASL_SSL", ("127.0.0.1:5",)),
    "elsewhere": (("kafka-1:9092",), "ours", "SASL_SSL", ("kafka-1:9092",)),
    "another-cluster": (("127.0.0.1:1",), "theirs", "SASL_SSL", ("127.0.0.1:1",)),
    "another-listener": (("127.0.0.1:1",), "ours", "SASL_PLAINTEXT", ("127.0.0.1:1",)),
    "admin": (("127.0.0.1:1",), "ours", "SASL_SSL", ("127.0.0.1:1",)),
}
NOW = Listeners("ours", "127.0.0.1:5", "127.0.0.1:6")


def write_clients(home: Path) -> None:
    for name, (addresses, cluster, protocol, _) in CLIENTS.items():
        security = KafkaSecurity(protocol=protocol, username="x", password_file=Path("/p"), ca_file=Path("/c"))  # type: ignore[arg-type]
        config = KafkaConfig(bootstrap=addresses, cluster_id=cluster, security=security)
        write_client(home / "clients" / f"{name}.toml", config)


def test_clients_follow_the_broker_to_other_ports_whatever_port_they_knew(tmp_path: Path) -> None:
    write_clients(tmp_path)
    told: list[str] = []
    readdress(tmp_path, NOW, told.append)
    found = {name: read_client(tmp_path / "clients" / f"{name}.toml").bootstrap for name in CLIENTS}
    assert found == {name: row[3] for name, row in CLIENTS.items()}
    assert told == []


def test_a_clients_file_that_cannot_be_read_keeps_no_other_from_being_mended(tmp_path: Path) -> None:
    write_clients(tmp_path)
    broken = tmp_path / "clients" / "broken.toml"
    for content in (b"", b"[log.kafka", b"\xff", b"[log.kafka]\nbootstrap = 3"):
        broken.write_bytes(content)
        told: list[str] = []
        readdress(tmp_path, NOW, told.append)
        assert [str(broken) in text and "access apply" in text for text in told] == [True]
        assert read_client(tmp_path / "clients" / "moved.toml").bootstrap == ("127.0.0.1:5",)
        assert broken.read_bytes() == content


def test_a_home_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        claim(tmp_path / "home")
        furnish(tmp_path / "home")
    finally:
        os.umask(old)
    made = [tmp_path / "home", *(tmp_path / "home").iterdir()]
    assert {path.name: path.stat().st_mode & 0o777 for path in made} == dict.fromkeys(
        ("home", "tls", "secrets", "clients", "data"), 0o700
    )


def made_home(home: Path) -> Path:
    claim(home)
    (home / MARKER).touch(mode=0o600)
    furnish(home)
    for name in ("secrets/admin.password", "tls/ca.key", "clients/admin.toml", "broker.json", "server.properties"):
        write_private(home / name, b"{}")
    return home


def test_an_empty_folder_of_ours_becomes_a_home_whatever_its_mode(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    assert made_home(tmp_path / "home").stat().st_mode & 0o777 == 0o700


PLACES = (
    ".",
    "secrets",
    "tls",
    "clients",
    "data",
    "secrets/admin.password",
    "tls/ca.key",
    "clients/admin.toml",
    MARKER,
)


@pytest.mark.parametrize("place", [*PLACES, "broker.json", "server.properties"])
def test_what_others_can_write_is_no_home(tmp_path: Path, place: str) -> None:
    home = made_home(tmp_path / "home")
    claim(home)
    path = home / place
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(
        LocalBrokerError, match=r"(?s)can be written by others \(mode 0[0-7]+\).*mend: .*chmod go-w "
    ) as told:
        LocalBroker(home).up(libs=None)
    assert str(path) in str(told.value)
    path.chmod(path.stat().st_mode & ~0o020)
    claim(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("place", PLACES)
def test_what_somebody_else_made_is_no_home(tmp_path: Path, place: str) -> None:
    home = made_home(tmp_path / "home")
    os.chown(home / place, 65534, 65534)
    for act in (lambda: LocalBroker(home).up(libs=None), LocalBroker(home).certificates):
        with pytest.raises(LocalBrokerError, match=r"(?s)belongs to .*, not to root.*mend: .*chown root "):
            act()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_empty_folder_of_somebody_elses_is_no_home(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o777)
    os.chown(tmp_path / "home", 65534, 65534)
    with pytest.raises(LocalBrokerError, match="belongs to "):
        LocalBroker(tmp_path / "home").up(libs=None)
    assert list((tmp_path / "home").iterdir()) == []


# Processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def state_of(process: ProcessIdentity) -> BrokerState:
    return BrokerState(
        pid=process.pid,
        started=process.started,
        cluster_id="c",
        bootstrap="127.0.0.1:1",
        mtls_bootstrap="127.0.0.1:2",
        controller="127.0.0.1:3",
        libs="/none",
    )


def test_a_process_that_was_given_the_number_later_is_not_stopped(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    import msgspec

    started = started_at(sleeper.pid)
    assert started is not None
    boot, tick = started.split("/")
    for other in (f"{boot}/{int(tick) - 1}", f"{boot[::-1]}/{tick}"):
        state = state_of(ProcessIdentity(sleeper.pid, other))
        (tmp_path / MARKER).touch()
        write_private(tmp_path / "broker.json", msgspec.json.encode(state))
        broker = LocalBroker(tmp_path)
        assert broker.status()["running"] is False
        assert broker.down() is False
        assert sleeper.poll() is None


def stand_in(home: Path, seconds: int = 60) -> ProcessIdentity:
    """A process with the command line of this home's Kafka."""
    arguments = ["-c", f"import time; time.sleep({seconds})", "kafka.Kafka", str(home / "server.properties")]
    return spawn_java(Path(sys.executable), arguments, log=home / "server.log")


@pytest.mark.parametrize("known", [None, b"{", b'{"pid": 1}'])
def test_down_stops_what_a_killed_start_left_behind_whatever_broker_json_says(
    tmp_path: Path, known: bytes | None
) -> None:
    home, other = made_home(tmp_path / "home"), made_home(tmp_path / "other")
    (home / "broker.json").unlink()
    if known is not None:
        write_private(home / "broker.json", known)
    ours, theirs = stand_in(home), stand_in(other)
    (tmp_path / "link").symlink_to(home)
    try:
        assert java_of(tmp_path / "link" / "server.properties") == [ours]
        assert LocalBroker(home).down() is True
        assert not runs(ours)
        assert runs(theirs)
    finally:
        assert stop(theirs, wait_s=10) is True


def test_down_believes_no_process_number_that_somebody_else_may_have_written(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    import msgspec

    home = made_home(tmp_path / "home")
    started = started_at(sleeper.pid)
    assert started is not None
    write_private(home / "broker.json", msgspec.json.encode(state_of(ProcessIdentity(sleeper.pid, started))))
    ours = stand_in(home)
    (home / "broker.json").chmod(0o666)
    assert LocalBroker(home).down() is True
    assert not runs(ours)
    assert sleeper.poll() is None
    (home / "broker.json").chmod(0o600)
    assert LocalBroker(home).down() is True
    assert sleeper.poll() is not None


def test_down_during_a_start_ends_it(tmp_path: Path) -> None:
    """The `up` holds the home until its broker ends: `down` must not wait for the one to wait for the other."""
    home = made_home(tmp_path / "home")
    (home / "broker.json").unlink()
    held, started = threading.Event(), []

    def up() -> None:
        with lease(home / MARKER, what="`draftloop broker`"):
            held.set()
            time.sleep(0.5)
            started.append(stand_in(home))
            while runs(started[0]):
                time.sleep(0.01)

    thread = threading.Thread(target=up)
    thread.start()
    held.wait()
    began = time.monotonic()
    assert LocalBroker(home).down(wait_s=20) is True
    thread.join()
    assert time.monotonic() - began < 10
    assert not runs(started[0])


def test_stop_ends_a_frozen_process_and_one_that_does_not_listen(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    for code, freeze, wait_s in (("import time; time.sleep(60)", True, 10.0), (stubborn, False, 0.2)):
        log = tmp_path / "log"
        process = spawn_java(Path(sys.executable), ["-c", code], log=log)
        while not freeze and "deaf" not in log.read_text():
            time.sleep(0.01)
        if freeze:
            os.kill(process.pid, signal.SIGSTOP)
        assert runs(process)
        assert stop(process, wait_s=wait_s) is True
        assert not runs(process)
        assert stop(process, wait_s=wait_s) is False
        with pytest.raises(ChildProcessError):  # nothing of it is left, no zombie either
            os.waitpid(process.pid, os.WNOHANG)


def test_what_we_start_is_out_of_reach_of_our_terminal_and_our_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "canary")
    code = "import os; print(os.getsid(0) == os.getpid(), sorted(os.environ), os.read(0, 1))"
    process = spawn_java(Path(sys.executable), ["-c", code], log=tmp_path / "log")
    while runs(process):
        time.sleep(0.01)
    assert (tmp_path / "log").read_text().strip() == "True ['LANG', 'LC_ALL'] b''"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("case \"$*\" in *format*) echo 'disk on fire'; exit 1;; esac", "could not format .*/data: .*disk on fire"),
        ("case \"$*\" in *kafka.Kafka*) echo 'port taken' >&2; exit 1;; esac", "ended while starting: .*port taken"),
    ],
)
def test_a_java_that_dies_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    script(tmp_path / "bin" / "java", f"echo 'openjdk version \"17\"' >&2; {text}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(LocalBrokerError, match=told):
        LocalBroker(tmp_path / "home").up(libs=jars(tmp_path / "libs"))
    assert LocalBroker(tmp_path / "home").status()["running"] is False

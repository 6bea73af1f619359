"""How Kafka's settings are checked, where its secrets come from, and that no message holds one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from samples import chain, security

from draftloop.pipeline.errors import (
    AuthenticationError,
    ConfigError,
)
from draftloop.pipeline.stream import kafka_config
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity, read_client, read_secret, write_client

CANARY = "canary-7f3a"
HERE = ("127.0.0.1:9092",)
FAR = ("kafka.example:9092",)


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    file = tmp_path / "password"
    file.write_text(f"{CANARY}\n")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ca_file": None}, "SASL_SSL needs ca_file"),
        ({"username": None}, "SCRAM-SHA-512 needs username"),
        ({"username": f"a,{CANARY}"}, "username: ',' and '=' cannot be used"),
        ({"password_file": None, "password_env": f"{CANARY}!"}, "is the name of an environment variable"),
        ({"password_file": None, "password_env": ""}, "is the name of an environment variable"),
        ({"mechanism": CANARY}, "Input should be"),
        ({"password_file": None}, "exactly one of password_file and password_env"),
        ({"password_env": "X"}, "exactly one of password_file and password_env"),
        ({"mechanism": "OAUTHBEARER"}, "OAUTHBEARER needs token_command"),
        ({"mechanism": "PLAIN"}, "Input should be"),
        ({"cert_file": "/a.pem"}, "cert_file and key_file go together"),
        ({"password": CANARY}, "Extra inputs are not permitted"),
    ],
)
def test_an_incomplete_security_block_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told) as error:
        security(**settings)
    assert CANARY not in str(error.value)


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SASL_PLAINTEXT"])
def test_plain_text_goes_to_this_machine_only(protocol: str) -> None:
    plain = security(protocol=protocol)
    for address in ("localhost:9092", "127.0.0.1:9092", "[::1]:9092"):
        assert KafkaConfig(bootstrap=(address,), security=plain).bootstrap == (address,)
    for address in ("kafka.example:9092", "10.0.0.1:9092", "localhost.example:9092", "0.0.0.0:9092"):
        with pytest.raises(ValidationError, match="without TLS only to this machine's loopback"):
            KafkaConfig(bootstrap=(HERE[0], address), security=plain)


@pytest.mark.parametrize(
    "address",
    ["kafka", "kafka:", ":9092", "kafka:port", f"u:{CANARY}@kafka:9092", f"//{CANARY}:1", "SASL_SSL://kafka:9092"],
)
def test_an_address_is_host_and_port_and_not_quoted_where_it_is_not(address: str) -> None:
    with pytest.raises(ValidationError, match="address 2 is not host:port") as error:
        KafkaConfig(bootstrap=(HERE[0], address))
    assert CANARY not in str(error.value)


@pytest.mark.parametrize(
    "address", ["kafka-1.example:9092", "[::1]:9092", "::1:9092", "[fe80::1%eth0]:1", "bücher.de:1"]
)
def test_hosts_are_names_and_both_kinds_of_numbers(address: str) -> None:
    assert KafkaConfig(bootstrap=(address,)).bootstrap == (address,)


def test_what_is_missing_for_a_connection_is_named() -> None:
    with pytest.raises(ConfigError, match=r"setting log\.kafka\.bootstrap is missing"):
        KafkaConfig().required()
    with pytest.raises(ConfigError, match=r"setting log\.kafka\.security is missing"):
        KafkaConfig(bootstrap=HERE).required()


def test_secrets_come_from_a_file_or_the_environment_and_are_read_anew(
    password_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_file = security(password_file=password_file)
    assert by_file.password() == CANARY
    password_file.write_text("rotated")
    assert by_file.password() == "rotated"
    by_environment = security(password_file=None, password_env="DRAFTLOOP_TEST_PASSWORD")
    with pytest.raises(ConfigError, match=r"DRAFTLOOP_TEST_PASSWORD \(password_env\) is not set"):
        by_environment.password()
    monkeypatch.setenv("DRAFTLOOP_TEST_PASSWORD", CANARY)
    assert by_environment.password() == CANARY


@pytest.mark.parametrize(("content", "told"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff\xfe", "cannot be")])
def test_a_secret_that_cannot_be_used_is_told_by_its_place(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    with pytest.raises(ConfigError, match=f"secret file {file} {told}"):
        read_secret(file)


@pytest.mark.parametrize(
    ("mode", "told"),
    [(0o600, ""), (0o640, ""), (0o644, "read"), (0o604, "read"), (0o660, "written"), (0o602, "written")],
)
def test_a_secret_that_others_can_write_or_all_can_read_is_refused(password_file: Path, mode: int, told: str) -> None:
    password_file.chmod(mode)
    if told:
        mend = f"(?s)can be {told} by others.*mend: chmod 600 {password_file}"
        with pytest.raises(ConfigError, match=mend) as error:
            read_secret(password_file)
        assert CANARY not in chain(error.value)
    else:
        assert read_secret(password_file) == CANARY


def test_a_secret_that_the_machine_mounts_for_all_to_read_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(mode: int, owner: int) -> os.stat_result:
        return os.stat_result((0o100000 | mode, 0, 0, 1, owner, owner, 0, 0, 0, 0))

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert kafka_config._exposed(found(0o644, 0), 0) is None, "root's and not ours"
    assert kafka_config._exposed(found(0o644, 1000), os.ST_RDONLY) is None, "a read-only mount"
    assert kafka_config._exposed(found(0o644, 1000), 0) == "read"
    assert kafka_config._exposed(found(0o664, 0), os.ST_RDONLY) == "written"


def token(*command: str) -> KafkaSecurity:
    return security(mechanism="OAUTHBEARER", token_command=command)


def test_a_token_is_what_the_command_prints() -> None:
    assert token(sys.executable, "-c", "print(' t.o.ken ')").token() == "t.o.ken"


@pytest.mark.parametrize(
    ("program", "told"),
    [("raise SystemExit('canary-7f3a')", "gave no token (exit 1)"), ("print()", "gave no token (exit 0)")],
)
def test_a_command_without_a_token_is_told_without_its_output(program: str, told: str) -> None:
    with pytest.raises(AuthenticationError) as error:
        token(sys.executable, "-c", program).token()
    assert told in str(error.value)
    assert CANARY not in chain(error.value)


def test_a_token_command_that_hangs_or_is_missing_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftloop.pipeline.stream.kafka_config.COMMAND_TIMEOUT_S", 0.2)
    with pytest.raises(AuthenticationError, match="did not run: TimeoutExpired") as slow:
        token(sys.executable, "-c", "import time; time.sleep(9)", CANARY).token()
    with pytest.raises(AuthenticationError, match="did not run: FileNotFoundError") as missing:
        token("/no/such/command", CANARY).token()
    assert CANARY not in chain(slow.value) + chain(missing.value)


PATHS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0\x7f/"), min_size=1, max_size=12).map(
    lambda name: Path("/") / name
)


@given(ca=PATHS, username=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x7f,="), min_size=1))
def test_a_clients_file_says_what_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, ca: Path, username: str
) -> None:
    file = tmp_path_factory.mktemp("client") / "client.toml"
    config = KafkaConfig(bootstrap=FAR, cluster_id="c", security=security(ca_file=ca, username=username))
    write_client(file, config)
    assert read_client(file) == config
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_clients_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """What a full disk or a kill in the middle leaves: the file as it was, and for the next write nothing."""
    file = tmp_path / "clients" / "client.toml"
    before = KafkaConfig(bootstrap=FAR, security=security())
    write_client(file, before)
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from draftloop.pipeline.stream.kafka_config import read_client, write_client\n"
        "file = Path(sys.argv[1]); config = read_client(file)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN if sys.argv[2] == 'full' else signal.SIG_DFL)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20)); write_client(file, config)"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for how, status in (("full", 1), ("kill", -signal.SIGXFSZ)):
        done = subprocess.run(
            [sys.executable, "-c", program, str(file), how], capture_output=True, check=False, env=environment
        )
        assert done.returncode == status, done.stderr
        assert read_client(file) == before
        after = before.model_copy(update={"bootstrap": HERE})
        write_client(file, after)
        assert read_client(file) == after
        write_client(file, before)
        assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_clients_folder_is_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_client(tmp_path / "clients" / "client.toml", KafkaConfig(bootstrap=FAR, security=security()))
    finally:
        os.umask(old)
    assert (tmp_path / "clients").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "clients" / "client.toml").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_no_clients_is_told_without_its_content(tmp_path: Path) -> None:
    file = tmp_path / "client.toml"
    for content, told in (
        ("", "has no section"),
        ("[log.kafka", "cannot be read: Expected"),
        (f'[log.kafka]\npassword = "{CANARY}"', "log.kafka.password: Extra inputs"),
        ("[log]\nkafka = 3", "log.kafka: Input should be"),
        ('[log.kafka]\nbootstrap = "kafka:9092"', "log.kafka.bootstrap: Input should be"),
        ('[log.kafka.security]\nmechanism = "PLAIN"', "log.kafka.security.mechanism: Input should be 'SCRAM-SHA-512'"),
        ('[log.kafka.security]\nusername = "a"', "log.kafka.security: Value error, SASL_SSL needs ca_file"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=re.escape(told)) as error:
            read_client(file)
        assert CANARY not in str(error.value)
        assert str(file) in str(error.value)


def test_the_capture_hook_does_not_import_kafka() -> None:
    program = (
        "import sys; import draftloop.serving_hooks.capture, draftloop.pipeline.stream.kafka_config,"
        " draftloop.pipeline.stream.tls; print([name for name in sys.modules if name.split('.')[0] == 'kafka'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert done.stdout.strip() == "[]"

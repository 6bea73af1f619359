"""How to reach Kafka and as whom: one block for every client. It names where secrets are and never holds one."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftloop.pipeline.errors import AuthenticationError, ConfigError
from draftloop.pipeline.stream.private_files import OTHERS_WRITE, make_private, write_private

COMMAND_TIMEOUT_S = 30.0
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST = re.compile(r"[\w.-]+|\[?[0-9A-Fa-f:.]+(%[\w.-]+)?\]?")
FORM = "docs/kafka.md shows the form; secrets are named by password_file or password_env, never written into it"


class _Section(BaseModel):
    # A value in the wrong place may be a password: pydantic is not to quote any.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class KafkaSecurity(_Section):
    """TLS and login. `ca_file` is the only root trusted: a certificate of another CA is refused."""

    protocol: Literal["SASL_SSL", "SSL", "SASL_PLAINTEXT", "PLAINTEXT"] = "SASL_SSL"
    mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "OAUTHBEARER"] = "SCRAM-SHA-512"
    username: str | None = None
    password_file: Path | None = None
    password_env: str | None = None  # the name of an environment variable
    token_command: tuple[str, ...] = ()  # prints a bearer token; run anew whenever the client wants one
    ca_file: Path | None = None
    cert_file: Path | None = None  # mTLS: our certificate and its key
    key_file: Path | None = None
    key_password_file: Path | None = None
    check_hostname: bool = True

    @property
    def encrypted(self) -> bool:
        return self.protocol in ("SASL_SSL", "SSL")

    @property
    def logs_in(self) -> bool:
        return self.protocol.startswith("SASL")

    @property
    def principal(self) -> str:
        """Who the broker will take us for, for messages."""
        if self.logs_in:
            return self.username or "the token's subject"
        return f"the subject of {self.cert_file}" if self.cert_file else "nobody"

    @model_validator(mode="after")
    def _complete(self) -> KafkaSecurity:
        if self.encrypted and self.ca_file is None:
            raise ValueError(f"{self.protocol} needs ca_file, the CA to trust")
        if self.username is not None and set(self.username) & set(",="):
            raise ValueError("username: ',' and '=' cannot be used in a SCRAM name")
        if self.password_env is not None and not _VARIABLE.fullmatch(self.password_env):
            raise ValueError("password_env is the name of an environment variable: letters, digits and '_' only")
        if self.logs_in and self.mechanism == "OAUTHBEARER" and not self.token_command:
            raise ValueError("OAUTHBEARER needs token_command")
        if self.logs_in and self.mechanism != "OAUTHBEARER":
            if not self.username:
                raise ValueError(f"{self.mechanism} needs username")
            if (self.password_file is None) == (self.password_env is None):
                raise ValueError(f"{self.mechanism} needs exactly one of password_file and password_env")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        return self

    def password(self) -> str:
        """The SCRAM password, read anew. Raises ConfigError naming where it should be, never what was there."""
        if self.password_file is not None:
            return read_secret(self.password_file)
        value = os.environ.get(self.password_env or "")
        if not value:
            raise ConfigError(
                f"environment variable {self.password_env} (password_env) is not set",
                mend="set it, or use password_file",
            )
        return value

    def key_password(self) -> str | None:
        """The password of `key_file`, where it has one."""
        return read_secret(self.key_password_file) if self.key_password_file else None

    def token(self) -> str:
        """A fresh bearer token. Raises AuthenticationError where the command gives none."""
        command = self.token_command[0]
        try:
            done = subprocess.run(
                self.token_command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:  # from None: a time-out quotes the whole command
            raise AuthenticationError(
                f"token_command {command!r} did not run: {type(error).__name__}", mend="run it by hand"
            ) from None
        if done.returncode or not done.stdout.strip():  # its output may hold a secret: only its status is told
            raise AuthenticationError(
                f"token_command {command!r} gave no token (exit {done.returncode})", mend="run it by hand"
            )
        return done.stdout.strip()


class KafkaConfig(_Section):
    """A cluster, the topics of ours on it, and the limits of our clients."""

    bootstrap: tuple[str, ...] = ()  # host:port
    cluster_id: str | None = None  # where given, another cluster is refused
    topic_prefix: str = Field(default="draftloop.", min_length=1)  # topics outside it are not looked at
    security: KafkaSecurity | None = None
    compression: Literal["none", "lz4", "zstd"] = "zstd"
    max_record_bytes: int = Field(default=4 * 2**20, ge=1024)  # not above the topics' max.message.bytes
    connect_timeout_s: float = Field(default=10.0, gt=0, le=300)
    request_timeout_s: float = Field(default=15.0, ge=0.1, le=300)  # without an answer, or without progress
    delivery_timeout_s: float = Field(default=20.0, ge=0.1, le=300)  # of one batch; what failed may be handed in again

    @model_validator(mode="after")
    def _plain_text_stays_here(self) -> KafkaConfig:
        for number, address in enumerate(self.bootstrap, 1):
            host, _, port = address.rpartition(":")
            if not (_HOST.fullmatch(host) and port.isascii() and port.isdigit()):  # it may hold a password: not quoted
                raise ValueError(f"bootstrap: address {number} is not host:port")
            if self.security is not None and not self.security.encrypted and not _is_loopback(host):
                raise ValueError(f"{self.security.protocol} to {address}: without TLS only to this machine's loopback")
        return self

    def required(self) -> KafkaSecurity:
        """The security block. Raises ConfigError where addresses or the block are missing."""
        if not self.bootstrap or self.security is None:
            missing = "log.kafka.bootstrap" if not self.bootstrap else "log.kafka.security"
            raise ConfigError(
                f"setting {missing} is missing",
                mend="set it; for a broker on this machine: `draftloop broker up --home DIR`,"
                " `draftloop access apply --home DIR`, then --config DIR/clients/NAME.toml",
            )
        return self.security


def read_secret(file: Path) -> str:
    """A secret's file without its last line break. Raises ConfigError, also where others can write or read the file."""
    try:
        with file.open() as stream:
            exposed = _exposed(os.fstat(stream.fileno()), os.fstatvfs(stream.fileno()).f_flag)
            value = "" if exposed else stream.read().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"secret file {file} cannot be read: {type(error).__name__}", mend="check path and rights"
        ) from error
    if exposed:
        raise ConfigError(f"secret file {file} can be {exposed} by others", mend=f"chmod 600 {file}")
    if not value:
        raise ConfigError(f"secret file {file} is empty", mend="write the secret into it")
    return value


def _exposed(found: os.stat_result, mount_flags: int) -> str | None:
    """What others can do to a secret. Kubernetes and Docker mount secrets for all to read: root's, or read-only."""
    if found.st_mode & OTHERS_WRITE:
        return "written"
    mounted = found.st_uid == 0 != os.geteuid() or mount_flags & os.ST_RDONLY
    return "read" if found.st_mode & stat.S_IROTH and not mounted else None


def read_client(file: Path) -> KafkaConfig:
    """The Kafka block of a client's TOML, as `write_client` leaves it or a person writes it. Raises ConfigError."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))["log"]["kafka"]
        return KafkaConfig.model_validate(values)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no client file {file}",
            mend="on this machine `draftloop broker up` makes the administrator's, `draftloop access apply` the others;"
            " for a cluster of yours write it by hand as docs/kafka.md shows",
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"client file {file} cannot be read: {error}", mend="correct the place named") from error
    except (KeyError, TypeError):
        raise ConfigError(f"client file {file} has no section [log.kafka]", mend=FORM) from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]  # an input may be a password in the wrong place
        key = ".".join(("log.kafka", *(str(part) for part in first["loc"])))
        raise ConfigError(f"client file {file}: {key}: {first['msg']}", mend=FORM) from None


def write_client(file: Path, config: KafkaConfig) -> None:
    """A TOML layer that makes Kafka the log, for --config; whole or not at all, for its owner only. Raises OSError."""
    lines = ["[log]", 'kind = "kafka"']
    values = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    security = values.pop("security", {})
    for title, section in (("log.kafka", values), ("log.kafka.security", security)):
        # JSON's strings, numbers, booleans and lists are TOML's too.
        rows = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in section.items())
        lines += ["", f"[{title}]", *rows]
    make_private(file.parent)
    write_private(file, ("\n".join(lines) + "\n").encode())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

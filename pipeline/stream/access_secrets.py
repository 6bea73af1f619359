"""Where the passwords of Kafka users and their client files are kept: made once, seen by nobody, in no message."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

from draftloop.pipeline.errors import ConfigError, StorageError
from draftloop.pipeline.stream.access_spec import AccessSpec, PrincipalSpec
from draftloop.pipeline.stream.certificates import RENEW_DAYS, Authority, days_left
from draftloop.pipeline.stream.kafka_config import KafkaConfig, KafkaSecurity, read_client, read_secret, write_client
from draftloop.pipeline.stream.private_files import write_private

COMMAND_TIMEOUT_S = 60.0


class Secrets(Protocol):
    """Keeps each user's password. A new one is offered, given to the cluster, then settled: a crash loses neither."""

    def kept(self, principal: str) -> bool:
        """Whether the user's password is kept, as far as can be told."""

    def offered(self, principal: str) -> str | None:
        """A password that was offered and not settled."""

    def current(self, principal: str) -> str | None:
        """The settled password, where this store can give it back."""

    def offer(self, principal: str, password: str) -> None:
        """Keep a new password beside the present one. Raises StorageError."""

    def settle(self, principal: str) -> None:
        """The cluster has the offered password: it is the present one now. Raises StorageError."""

    def obstacle(self, principal: PrincipalSpec) -> str | None:
        """Why the principal's client file cannot be written."""

    def client_differs(self, principal: PrincipalSpec) -> bool:
        """Whether the principal's client file is missing or out of date."""

    def write_client(self, principal: PrincipalSpec) -> None:
        """Write the principal's client file. Raises StorageError."""


class ClientFiles:
    """HOME/clients/NAME.toml of each principal, and on a local broker the certificates of those that use one."""

    def __init__(
        self, home: Path, spec: AccessSpec, admin: KafkaConfig, *, mtls_bootstrap: tuple[str, ...] = ()
    ) -> None:
        """admin: how the administrator reaches the cluster. mtls_bootstrap: the listener that takes certificates."""
        self._home = home.absolute()
        self._spec = spec
        self._admin = admin
        self._mtls_bootstrap = mtls_bootstrap

    def obstacle(self, principal: PrincipalSpec) -> str | None:
        if principal.auth != "mtls":
            return None
        if not self._mtls_bootstrap:
            return f"{principal.name} logs in by certificate: no listener for that is known, set mtls_bootstrap"
        certificate, key = self._certificate(principal)
        if self._authority() is None and not (certificate.exists() and key.exists()):
            return (
                f"{principal.name} logs in by certificate: {certificate} and {key.name} are not there;"
                f" have your CA issue one with CN={principal.name}"
            )
        return None

    def differs(self, principal: PrincipalSpec, password: KafkaSecurity | None) -> bool:
        if principal.auth == "mtls" and not self._certificate_good(principal):
            return True
        try:
            return read_client(self._file(principal)) != self._wanted(principal, password)
        except ConfigError:
            return True

    def write(self, principal: PrincipalSpec, password: KafkaSecurity | None) -> None:
        wanted = self._wanted(principal, password)
        try:
            if principal.auth == "mtls":
                self._issue(principal)
            write_client(self._file(principal), wanted)
        except OSError as error:
            raise StorageError(
                f"cannot write the client file of {principal.name}: {error.strerror}", mend=f"check {self._home}"
            ) from error

    def scram(self, principal: str, *, file: Path | None = None, env: str | None = None) -> KafkaSecurity:
        admin = self._admin.required()
        return KafkaSecurity(
            protocol="SASL_SSL" if admin.encrypted else "SASL_PLAINTEXT",
            username=principal,
            password_file=file,
            password_env=env,
            ca_file=admin.ca_file and admin.ca_file.absolute(),
            check_hostname=admin.check_hostname,
        )

    def _file(self, principal: PrincipalSpec) -> Path:
        return self._home / "clients" / f"{principal.name}.toml"

    def _certificate(self, principal: PrincipalSpec) -> tuple[Path, Path]:
        tls = self._home / "tls"
        return tls / f"{principal.name}.pem", tls / f"{principal.name}.key"

    def _wanted(self, principal: PrincipalSpec, password: KafkaSecurity | None) -> KafkaConfig:
        admin = self._admin.required()
        ca = admin.ca_file and admin.ca_file.absolute()
        bootstrap = self._admin.bootstrap
        if principal.auth == "mtls":
            bootstrap = self._mtls_bootstrap
            certificate, key = self._certificate(principal)
            security = KafkaSecurity(
                protocol="SSL", ca_file=ca, cert_file=certificate, key_file=key, check_hostname=admin.check_hostname
            )
        elif principal.auth == "oauth":
            security = KafkaSecurity(
                protocol="SASL_SSL",
                mechanism="OAUTHBEARER",
                token_command=principal.token_command,
                ca_file=ca,
                check_hostname=admin.check_hostname,
            )
        else:
            assert password is not None
            security = password
        return KafkaConfig(
            bootstrap=bootstrap,
            cluster_id=self._admin.cluster_id,
            topic_prefix=self._spec.topic_prefix,
            security=security,
        )

    def _authority(self) -> Authority | None:
        """The local broker's own; a real cluster's issues certificates elsewhere."""
        tls = self._home / "tls"
        authority = Authority(tls / "ca.pem", tls / "ca.key")
        return authority if authority.key_file.exists() else None

    def _certificate_good(self, principal: PrincipalSpec) -> bool:
        certificate, key = self._certificate(principal)
        if not (certificate.exists() and key.exists()):
            return False
        return self._authority() is None or days_left(certificate) >= RENEW_DAYS

    def _issue(self, principal: PrincipalSpec) -> None:
        certificate, key = self._certificate(principal)
        authority = self._authority()
        if authority is not None and not self._certificate_good(principal):
            issued, issued_key = authority.client(principal.name)
            write_private(key, issued_key)
            write_private(certificate, issued)


class _Store:
    """What both stores do alike: client files that say where a password is."""

    def __init__(self, clients: ClientFiles) -> None:
        self._clients = clients

    def obstacle(self, principal: PrincipalSpec) -> str | None:
        return self._clients.obstacle(principal)

    def client_differs(self, principal: PrincipalSpec) -> bool:
        return self._clients.differs(principal, self._login(principal))

    def write_client(self, principal: PrincipalSpec) -> None:
        self._clients.write(principal, self._login(principal))

    def _login(self, principal: PrincipalSpec) -> KafkaSecurity | None:
        return self._password(principal.name) if principal.auth == "scram" else None

    def _password(self, principal: str) -> KafkaSecurity:
        """A SCRAM user's login, its password named by its place."""
        raise NotImplementedError


class SecretFolder(_Store):
    """One 0600 file a user: NAME.password, and NAME.password.new while a new one is on its way."""

    def __init__(self, folder: Path, clients: ClientFiles) -> None:
        super().__init__(clients)
        self._folder = folder.absolute()

    def kept(self, principal: str) -> bool:
        return self._file(principal).exists()

    def offered(self, principal: str) -> str | None:
        return self._read(self._new(principal))

    def current(self, principal: str) -> str | None:
        return self._read(self._file(principal))

    def offer(self, principal: str, password: str) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._new(principal), password.encode() + b"\n")
        except OSError as error:
            raise self._refused(principal, error) from error

    def settle(self, principal: str) -> None:
        try:
            self._new(principal).replace(self._file(principal))
        except OSError as error:
            raise self._refused(principal, error) from error

    def _password(self, principal: str) -> KafkaSecurity:
        return self._clients.scram(principal, file=self._file(principal))

    def _file(self, principal: str) -> Path:
        return self._folder / f"{principal}.password"

    def _new(self, principal: str) -> Path:
        return self._folder / f"{principal}.password.new"

    def _read(self, file: Path) -> str | None:
        return read_secret(file) if file.exists() else None

    def _refused(self, principal: str, error: OSError) -> StorageError:
        return StorageError(
            f"the password of {principal} cannot be kept in {self._folder}: {error.strerror}",
            mend="check the folder's rights and space; the user's password in the cluster did not change",
        )


class SecretCommand(_Store):
    """Hands each password to a command on its stdin; clients find theirs in an environment variable."""

    def __init__(self, command: tuple[str, ...], clients: ClientFiles) -> None:
        super().__init__(clients)
        self._command = command

    def kept(self, principal: str) -> bool:
        return True  # it cannot be looked at

    def offered(self, principal: str) -> str | None:
        return None

    def current(self, principal: str) -> str | None:
        return None

    def offer(self, principal: str, password: str) -> None:
        words = [word.replace("{principal}", principal) for word in self._command]
        try:
            # What the command prints may hold the password: only its status is told.
            status = subprocess.run(
                words,
                input=password.encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            ).returncode
            what = f"exit {status}" if status else ""
        except (OSError, subprocess.SubprocessError) as error:
            what = type(error).__name__
        if what:
            raise StorageError(
                f"secrets.command {words[0]!r} did not take the password of {principal}: {what}",
                mend="run it by hand; the user's password in the cluster did not change",
            )

    def settle(self, principal: str) -> None:
        pass

    def _password(self, principal: str) -> KafkaSecurity:
        variable = principal.upper().replace("-", "_").replace(".", "_") + "_PASSWORD"
        return self._clients.scram(principal, env=variable)


def open_secrets(
    spec: AccessSpec, home: Path, admin: KafkaConfig, *, mtls_bootstrap: tuple[str, ...] = ()
) -> SecretFolder | SecretCommand:
    """The store the access file names; `home` is the broker's folder."""
    clients = ClientFiles(home, spec, admin, mtls_bootstrap=spec.mtls_bootstrap or mtls_bootstrap)
    if spec.secrets.command:
        return SecretCommand(spec.secrets.command, clients)
    return SecretFolder(spec.secrets.folder or home / "secrets", clients)

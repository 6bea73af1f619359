"""A cluster's home folder opened for `access`: the access file, the administrator's connection, passwords, audit.

HOME/access.json remembers which access file was applied last: another one in its place, for instance draftloop's own
because `--access` was forgotten, would take back what that file gave.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from draftloop.pipeline.errors import ConfigError, StorageError
from draftloop.pipeline.lease import lease
from draftloop.pipeline.stream.access import Applied, Cluster, Connect, Matrix, Plan, apply, plan, verify
from draftloop.pipeline.stream.access_secrets import Secrets, open_secrets
from draftloop.pipeline.stream.access_spec import AccessSpec, load_spec
from draftloop.pipeline.stream.access_words import Commands
from draftloop.pipeline.stream.audit import Audit, LogAudit
from draftloop.pipeline.stream.broker import LocalBroker
from draftloop.pipeline.stream.kafka_config import KafkaConfig, read_client
from draftloop.pipeline.stream.private_files import write_private

REMEMBERED = "access.json"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a home's access file is. access None: draftloop's own; targets None: those in the file."""

    access: str | None = None
    targets: tuple[str, ...] | None = None
    sha256: str = ""  # of what the file said when it was applied; empty: never

    @property
    def file(self) -> Path | None:
        return None if self.access is None else Path(self.access)


@dataclass(frozen=True)
class Site:
    """What `plan`, `apply` and `verify` work on."""

    home: Path
    spec: AccessSpec
    cluster: Cluster
    secrets: Secrets
    audit: Audit
    source: Source
    applied: Source  # the last time; `sha256` empty: never

    @property
    def commands(self) -> Commands:
        """The commands of this home and file, as they are typed."""
        return Commands(self.home, self.source.file)

    def client(self, principal: str) -> KafkaConfig:
        """How a principal reaches the cluster. Raises ConfigError where `apply` has not made its file yet."""
        return read_client(self.home / "clients" / f"{principal}.toml")

    def plan(self) -> Plan:
        """See `access.plan`."""
        found = plan(self.spec, self.cluster, self.secrets, commands=self.commands)
        same_file = bool(self.applied.sha256) and self.applied.access == self.source.access
        return found._replace(file_changed=same_file and self.applied.sha256 != fingerprint(self.spec))

    def apply(
        self, *, rotate: Sequence[str] = (), prune: bool = False, on_act: Callable[[str], None] | None = None
    ) -> Applied:
        """See `access.apply`; the home remembers the access file from the first change on."""
        return apply(
            self.spec,
            self.cluster,
            self.secrets,
            self.audit,
            rotate=rotate,
            prune=prune,
            on_start=self._remember,
            on_act=on_act,
            commands=self.commands,
        )

    def verify(self, on_progress: Callable[[str], None] | None = None, *, connect: Connect | None = None) -> Matrix:
        """See `access.verify`, with the administrator's view."""
        return verify(
            self.spec, self.client, on_progress, cluster=self.cluster, connect=connect, commands=self.commands
        )

    def _remember(self) -> None:
        file, now = self.home / REMEMBERED, msgspec.structs.replace(self.source, sha256=fingerprint(self.spec))
        if now == self.applied:
            return
        try:
            write_private(file, msgspec.json.encode(now))
        except OSError as error:
            raise StorageError(f"{file} cannot be written: {error.strerror}", mend="check its folder") from error


def fingerprint(spec: AccessSpec) -> str:
    """SHA-256 of what an access file says, whatever its comments and order of keys."""
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()


def find_source(home: Path, file: Path | None, targets: Sequence[str] | None) -> tuple[Source, Source]:
    """(the access file to use, the one applied last): the file given, else the one remembered, else draftloop's own.

    Raises ConfigError where the remembered file is gone.
    """
    applied = _remembered(home / REMEMBERED)
    own = None if targets is None else tuple(targets)
    if file is not None:
        return Source(str(file.absolute()), own), applied
    if applied.file is not None and not applied.file.exists():
        raise ConfigError(
            f"access file {applied.file}, which was applied to {home} last, is not there any more",
            mend="put it back, or name the one that holds now: --access FILE (`draftloop access example` prints"
            " draftloop's own; it would take back what the lost file gave)",
        )
    return Source(applied.access, applied.targets if own is None else own), applied


def _remembered(file: Path) -> Source:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Source)
    except FileNotFoundError:
        return Source()
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{file}, which says which access file was applied, cannot be read: {type(error).__name__}",
            mend="remove it, then `draftloop access apply` with --access FILE writes it anew",
        ) from error


@contextmanager
def open_site(home: Path, file: Path | None, *, targets: Sequence[str] | None = None) -> Iterator[Site]:
    """Connect as the administrator that HOME/clients/admin.toml names; `broker up` writes that file, or you do.

    file: the access TOML; None: the one applied last, or the one that comes with draftloop. targets: in place of the
    file's own. One at a time on a home: two that give passwords at once could leave the files and the cluster with
    different ones. Raises ConfigError, BrokerError, LeaseHeldError.
    """
    from draftloop.pipeline.stream.kafka_admin import KafkaAdmin
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    source, applied = find_source(home, file, targets)
    spec = load_spec(source.file, targets=source.targets)
    admin = read_client(home / "clients" / "admin.toml")
    local = LocalBroker(home).state()
    mtls = (local.mtls_bootstrap,) if local is not None else ()
    log = KafkaLog(admin)
    try:
        with lease(home / "access.lock", what="access"), KafkaAdmin(admin) as cluster:
            secrets = open_secrets(spec, home, admin, mtls_bootstrap=mtls)
            yield Site(home, spec, cluster, secrets, LogAudit(log), source, applied)
    finally:
        log.close()

"""A cluster's home folder opened for `access`: the access file, the administrator's connection, passwords, audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftloop.pipeline.lease import lease
from draftloop.pipeline.stream.access import Cluster
from draftloop.pipeline.stream.access_secrets import Secrets, open_secrets
from draftloop.pipeline.stream.access_spec import AccessSpec, load_spec
from draftloop.pipeline.stream.audit import Audit, LogAudit
from draftloop.pipeline.stream.broker import LocalBroker
from draftloop.pipeline.stream.kafka_config import KafkaConfig, read_client


@dataclass(frozen=True)
class Site:
    """What `plan`, `apply` and `verify` work on."""

    home: Path
    spec: AccessSpec
    cluster: Cluster
    secrets: Secrets
    audit: Audit

    def client(self, principal: str) -> KafkaConfig:
        """How a principal reaches the cluster. Raises ConfigError where `apply` has not made its file yet."""
        return read_client(self.home / "clients" / f"{principal}.toml")


@contextmanager
def open_site(home: Path, file: Path | None, *, targets: Sequence[str] | None = None) -> Iterator[Site]:
    """Connect as the administrator that HOME/clients/admin.toml names; `broker up` writes that file, or you do.

    file: the access TOML; None: the one that comes with draftloop. targets: in place of the file's own.
    One at a time on a home: two that give passwords at once could leave the files and the cluster with different ones.
    Raises ConfigError, BrokerError, LeaseHeldError.
    """
    from draftloop.pipeline.stream.kafka_admin import KafkaAdmin
    from draftloop.pipeline.stream.kafka_log import KafkaLog

    spec = load_spec(file, targets=targets)
    admin = read_client(home / "clients" / "admin.toml")
    local = LocalBroker(home).state()
    mtls = (local.mtls_bootstrap,) if local is not None else ()
    log = KafkaLog(admin)
    try:
        with lease(home / "access.lock", what="access"), KafkaAdmin(admin) as cluster:
            yield Site(home, spec, cluster, open_secrets(spec, home, admin, mtls_bootstrap=mtls), LogAudit(log))
    finally:
        log.close()

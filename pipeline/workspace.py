"""The work folder: where everything of one loop lives on one machine, and how its parts are opened."""

from __future__ import annotations

import os
import pwd
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftloop.pipeline.config import Config
from draftloop.pipeline.errors import DraftloopError, ModelNotFoundError, StorageError
from draftloop.pipeline.stream.audit import AUDIT_TOPIC, Audit
from draftloop.pipeline.stream.log import CaptureLog
from draftloop.pipeline.stream.topics import slug

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from draftloop.pipeline.registry.registry import Registry
    from draftloop.trainers.target import Target

RAW_PREFIX = "draftloop.raw."


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths and openers; holds nothing open itself."""

    config: Config

    @property
    def root(self) -> Path:
        return self.config.work

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def drafters(self) -> Path:
        return self.root / "drafters"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def lease(self) -> Path:
        return self.root / "lease.lock"

    @property
    def staging(self) -> Path:
        """The swap agent's folder, which its engine sees too."""
        return self.config.replica.staging or self.root / "agent"

    def fetched(self, version: str) -> Path:
        """Where a champion version's folder is kept once it was downloaded."""
        return self.root / "fetched" / version

    def slug(self) -> str:
        """The target's name in topics: one topic a target model, because a drafter is trained for one target."""
        return slug(Path(self.config.target.path).name)

    def raw_topic(self) -> str:
        """What the hooks write."""
        return f"{RAW_PREFIX}{self.slug()}"

    def dlq_topic(self) -> str:
        """Where entries go that are no records."""
        return f"draftloop.dlq.{self.slug()}"

    def actor(self) -> str:
        """Who reads the log here, for the audit topic: the Kafka principal, or this machine's user."""
        security = self.config.log.kafka.security
        if self.config.log.kind == "kafka" and security is not None:
            return security.principal
        try:
            return pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            return f"uid {os.getuid()}"

    def require_target(self) -> None:
        """Raise ModelNotFoundError for a path where nothing is; a hub id is only told when it is loaded."""
        path = self.config.target.path
        if path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():
            raise ModelNotFoundError(f"no target at {path!r}: no such folder", mend="check target.path or --target")

    def _make_root(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make the work folder {self.root}: {error.strerror}",
                mend="set work=FOLDER to one you can write",
            ) from error

    def open_log(self, *, make_topics: bool = True) -> CaptureLog:
        """The capture log. Every caller closes its own. Kafka's topics are made by `draftloop access apply` alone."""
        self._make_root()
        if self.config.log.kind == "kafka":
            from draftloop.pipeline.stream.kafka_log import KafkaLog

            self.config.log.kafka.required()
            return KafkaLog(self.config.log.kafka)
        from draftloop.pipeline.stream.sqlite_log import SqliteLog

        log = SqliteLog(self.root / "capture.db")
        if make_topics:
            log.create_topic(self.raw_topic(), num_partitions=self.config.log.num_partitions)
            for topic in (self.dlq_topic(), AUDIT_TOPIC):
                log.create_topic(topic, num_partitions=1)
        return log

    def audit(self) -> Audit:
        """The audit topic of the capture log."""
        from draftloop.pipeline.stream.audit_spool import SpooledAudit

        def waiting(error: DraftloopError) -> None:
            print(f"the audit record waits in {spool} until the log is back: {error.message}", file=sys.stderr)

        spool = self.root / "audit-spool.jsonl"
        return SpooledAudit(self.open_log, spool, on_waiting=waiting)

    def open_registry(self) -> Registry:
        """MLflow at the configured address; its decisions are audited."""
        from draftloop.pipeline.registry.audited import AuditedRegistry
        from draftloop.pipeline.registry.mlflow_registry import MlflowRegistry

        self._make_root()
        mlflow = MlflowRegistry(self.config.tracking_uri, self.config.registry.name, self.root / "mlflow-artifacts")
        return AuditedRegistry(mlflow, self.audit())

    def signing_key(self) -> Ed25519PrivateKey:
        """The gate's key; made on first use, readable by its owner only."""
        from draftloop.pipeline.judge.verdict import load_or_make_key

        self._make_root()
        return load_or_make_key(self.root / "gate.key")

    def load_target(self) -> Target:
        """The target named in the configuration, with torch's threads set. Raises ModelNotFoundError."""
        import torch

        from draftloop.trainers.smollm2 import prepare_smollm2
        from draftloop.trainers.target import Target

        if self.config.num_threads:
            torch.set_num_threads(self.config.num_threads)
        path: str | Path = self.config.target.path
        if path == "smollm2":
            path = prepare_smollm2(self.root / "models")
        return Target.load(path, dtype=self.config.target.dtype, tap_layers=self.config.train.tap_layers)

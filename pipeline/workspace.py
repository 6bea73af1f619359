"""The work folder: where everything of one loop lives on one machine, and how its parts are opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftloop.pipeline.config import Config
from draftloop.pipeline.errors import ModelNotFoundError, StorageError
from draftloop.pipeline.stream.log import CaptureLog

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from draftloop.pipeline.registry.registry import Registry
    from draftloop.trainers.target import Target


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
        """The swap agent's folder."""
        return self.root / "agent"

    def fetched(self, version: str) -> Path:
        """Where a champion version's folder is kept once it was downloaded."""
        return self.root / "fetched" / version

    def raw_topic(self) -> str:
        """One topic a target model: a drafter is trained for one target."""
        slug = re.sub(r"[^a-z0-9-]+", "-", Path(self.config.target.path).name.lower()).strip("-")
        return f"draftloop.raw.{slug or 'target'}"

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

    def open_log(self) -> CaptureLog:
        """The capture log, with the raw topic made. Every caller closes its own."""
        from draftloop.pipeline.stream.sqlite_log import SqliteLog

        self._make_root()
        log = SqliteLog(self.root / "capture.db")
        log.create_topic(self.raw_topic(), num_partitions=self.config.log.num_partitions)
        return log

    def open_registry(self) -> Registry:
        """MLflow at the configured address."""
        from draftloop.pipeline.registry.mlflow_registry import MlflowRegistry

        self._make_root()
        return MlflowRegistry(self.config.tracking_uri, self.config.registry.name, self.root / "mlflow-artifacts")

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

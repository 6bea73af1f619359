"""A registry whose decisions leave records on the audit topic: before the alias moves and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftloop.pipeline.registry.registry import Candidate, Registry, Version
from draftloop.pipeline.stream.audit import Audit, audited


class AuditedRegistry:
    """`Registry` around another one. A promotion that cannot be recorded does not happen."""

    def __init__(self, registry: Registry, audit: Audit) -> None:
        self._registry = registry
        self._audit = audit

    def register(self, candidate: Candidate) -> Version:
        return self._registry.register(candidate)

    def find(self, job_key: str) -> Version | None:
        return self._registry.find(job_key)

    def promote(self, candidate_version: str, *, by: str, reason: str) -> Version:
        with audited(
            self._audit,
            "champion.promote",
            by=by,
            subject=f"candidate {candidate_version}",
            details={"reason": reason},
        ):
            return self._registry.promote(candidate_version, by=by, reason=reason)

    def champion(self) -> Version | None:
        return self._registry.champion()

    def set_champion(self, version: str, *, by: str, reason: str) -> Version:
        with audited(
            self._audit, "champion.rollback", by=by, subject=f"champion {version}", details={"reason": reason}
        ):
            return self._registry.set_champion(version, by=by, reason=reason)

    def champions(self) -> list[Version]:
        return self._registry.champions()

    def fetch(self, version: str, folder: Path) -> Path:
        return self._registry.fetch(version, folder)

    def verdict(self, version: str) -> dict[str, Any]:
        return self._registry.verdict(version)

"""The registry's protocol and its in-memory twin: candidates, champions, and one alias that names the live choice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import CheckpointError, VersionNotFoundError


@dataclass(frozen=True, slots=True)
class Version:
    """One registered drafter."""

    version: str  # "7"
    job_key: str  # the run-once job that made it
    digest: str  # sha256 of its checkpoint manifest (the marker's content)
    description: str
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the loop hands to the registry."""

    job_key: str
    folder: Path  # a published drafter folder
    digest: str
    verdict: Mapping[str, Any]  # the signed verdict, as judge/verdict.py writes it
    description: str  # markdown: the decision, for the reviewer
    tags: Mapping[str, str]  # at most five, short
    params: Mapping[str, str | int | float]
    metrics: Mapping[str, float]
    history: tuple[Mapping[str, float], ...]  # training curve: {"step", "loss", "tokens_per_s", ...}
    plots: Mapping[str, bytes]  # file name -> PNG
    tables: Mapping[str, Mapping[str, list[Any]]]  # file name -> columns
    snapshot_id: str
    snapshot_source: Mapping[str, str]  # topic, offsets, policy version: lineage without content


class Registry(Protocol):
    """`register` is idempotent by job key. Candidates and champions are two models: writing one is not promoting."""

    def register(self, candidate: Candidate) -> Version:
        """Store a candidate version; the same job key returns the version already there."""

    def find(self, job_key: str) -> Version | None:
        """The candidate version of a job."""

    def promote(self, candidate_version: str, *, by: str, reason: str) -> Version:
        """Copy a candidate into the champions and move the alias to the copy. Raises VersionNotFoundError."""

    def champion(self) -> Version | None:
        """The version the alias names; None means: keep what is live."""

    def set_champion(self, version: str, *, by: str, reason: str) -> Version:
        """Move the alias to an earlier champion version (roll back). Raises VersionNotFoundError."""

    def champions(self) -> list[Version]:
        """All champion versions, oldest first."""

    def fetch(self, version: str, folder: Path) -> Path:
        """Download a champion version's drafter folder into `folder`; returns it. Raises VersionNotFoundError."""

    def verdict(self, version: str) -> dict[str, Any]:
        """The signed verdict stored with a champion version."""


def fetch_once(registry: Registry, version: str, folder: Path) -> Path:
    """A champion version's folder, downloaded and verified once. Raises CheckpointError, VersionNotFoundError."""
    if not artifact.is_complete(folder):
        with artifact.staging(folder) as draft:
            registry.fetch(version, draft)
            artifact.verify(draft, kind="drafter", error=CheckpointError)
            os.rename(draft, folder)
    return folder


class MemoryRegistry:
    """The in-memory twin; drafter folders stay where they are and are copied by `fetch`."""

    def __init__(self) -> None:
        self._candidates: list[tuple[Version, Candidate]] = []
        self._champions: list[tuple[Version, Candidate]] = []
        self._alias: str | None = None
        self.decisions: list[tuple[str, str, str]] = []  # version, by, reason

    def register(self, candidate: Candidate) -> Version:
        existing = self.find(candidate.job_key)
        if existing is not None:
            return existing
        version = Version(
            str(len(self._candidates) + 1),
            candidate.job_key,
            candidate.digest,
            candidate.description,
            dict(candidate.tags),
        )
        self._candidates.append((version, candidate))
        return version

    def find(self, job_key: str) -> Version | None:
        return next((version for version, _ in self._candidates if version.job_key == job_key), None)

    def promote(self, candidate_version: str, *, by: str, reason: str) -> Version:
        found = next((pair for pair in self._candidates if pair[0].version == candidate_version), None)
        if found is None:
            raise VersionNotFoundError(
                f"no candidate version {candidate_version}", mend="list them with `draftloop status`"
            )
        known, candidate = found
        champion = Version(
            str(len(self._champions) + 1), known.job_key, known.digest, known.description, dict(known.tags)
        )
        self._champions.append((champion, candidate))
        return self.set_champion(champion.version, by=by, reason=reason)

    def champion(self) -> Version | None:
        return None if self._alias is None else self._champion(self._alias)[0]

    def set_champion(self, version: str, *, by: str, reason: str) -> Version:
        found = self._champion(version)[0]
        self._alias = version
        self.decisions.append((version, by, reason))
        return found

    def champions(self) -> list[Version]:
        return [version for version, _ in self._champions]

    def fetch(self, version: str, folder: Path) -> Path:
        shutil.copytree(self._champion(version)[1].folder, folder, dirs_exist_ok=True)
        return folder

    def verdict(self, version: str) -> dict[str, Any]:
        return dict(self._champion(version)[1].verdict)

    def _champion(self, version: str) -> tuple[Version, Candidate]:
        for known, candidate in self._champions:
            if known.version == version:
                return known, candidate
        raise VersionNotFoundError(f"no champion version {version}", mend="list them with `draftloop status`")

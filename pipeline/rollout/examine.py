"""What must hold before a drafter may enter the engine, and what must hold once it is in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import CheckpointError, SwapFailedError, VersionNotFoundError
from draftloop.pipeline.fingerprint import Fingerprint, require_same
from draftloop.pipeline.losslessness import Divergence
from draftloop.pipeline.records import Condition, ProbeResult, SpecCounters
from draftloop.pipeline.registry.registry import Registry
from draftloop.pipeline.rollout.journal import BOOT, Journal, Served

CheckVerdict = Callable[[dict[str, Any], str, str], None]  # document, drafter digest, fingerprint digest

_MIN_SUSPICIOUS_STEPS = 8  # fewer steps may all be accepted by luck


class GreedyComparison(Protocol):
    """What comparing two probes says."""

    @property
    def lossless(self) -> bool: ...  # identical, or different at near ties only

    @property
    def divergences(self) -> Sequence[Divergence]: ...  # where a prompt's outputs first differ


Ties = tuple[Divergence, ...]
Compare = Callable[[ProbeResult, ProbeResult, float], GreedyComparison]  # before, after, tie margin


@dataclass(frozen=True)
class Staged:
    """A drafter that may be loaded."""

    version: str
    folder: Path
    digest: str
    tensors: str  # digest its loaded tensors must have; empty: its manifest names none
    document: Mapping[str, Any]  # its signed verdict


def stage(
    registry: Registry, version: str, journal: Journal, *, fingerprint: Fingerprint, check_verdict: CheckVerdict
) -> Staged:
    """Bring a champion version into staging, check files, verdict and target, and put the verdict beside it.

    The drafter of the first start has no verdict: the operator chose it. Raises CheckpointError, SwapRefusedError,
    FingerprintMismatchError; RegistryError and StorageError where it could not be brought.
    """
    place = journal.place(version)
    document = {} if version == BOOT else registry.verdict(version)
    if version != BOOT and (not artifact.is_complete(place) or digest_of(place) != document.get("digest")):
        bring(registry, version, place)
    manifest = artifact.verify(place, kind="drafter", error=CheckpointError)
    digest = digest_of(place)
    if version != BOOT:
        check_verdict(document, digest, fingerprint.digest)
    try:
        own = Fingerprint.from_dict(manifest.get("fingerprint"))
    except msgspec.ValidationError as error:
        raise CheckpointError(f"version {version} names no target: {error}", mend="train the drafter again") from error
    require_same(fingerprint, own, expected_of="the engine", found_of=f"version {version}")
    if version != BOOT:
        artifact.write_json(journal.verdict_file(version), document)
    return Staged(version, place, digest, str(manifest.get("tensor_digest", "")), document)


def at_hand(registry: Registry, known: Served, journal: Journal) -> Served:
    """What the engine serves, staged and verified, so that it can be loaded back.

    Raises VersionNotFoundError, CheckpointError where it cannot be had.
    """
    version = known.version or ""
    place = journal.place(version)
    if version != BOOT:
        if not artifact.is_complete(place):
            bring(registry, version, place)
        if not journal.verdict_file(version).is_file():
            artifact.write_json(journal.verdict_file(version), registry.verdict(version))
    manifest = artifact.verify(place, kind="drafter", error=CheckpointError)
    digest = digest_of(place)
    if known.digest and known.digest != digest:
        raise CheckpointError(f"the engine's version {version} is drafter {known.digest[:12]}, staged is {digest[:12]}")
    tensors = known.tensors or str(manifest.get("tensor_digest", ""))
    return Served(version=version, digest=digest, staged=True, tensors=tensors)


def found(condition: Condition, journal: Journal) -> Served:
    """What an engine says it serves, as something the agent did not load; staged where just that lies there."""
    version = condition.version
    staged = False
    if version is not None and condition.digest:
        with suppress(VersionNotFoundError):
            place = journal.place(version)
            staged = artifact.is_complete(place) and digest_of(place) == condition.digest
    return Served(version=version, digest=condition.digest, staged=staged, tensors=condition.tensors)


def serves(condition: Condition, known: Served) -> bool:
    """Whether an engine says it serves exactly this, as far as both sides name digests."""
    pairs = ((condition.digest, known.digest), (condition.tensors, known.tensors))
    return condition.version == known.version and all(a == b for a, b in pairs if a and b)


def bring(registry: Registry, version: str, place: Path) -> None:
    """Download a version beside `place`, then rename, so that a cut download is never taken for whole."""
    with artifact.staging(place) as draft:
        fetched = registry.fetch(version, draft / "fetched")
        artifact.verify(fetched, kind="drafter", error=CheckpointError)
        if place.exists():
            shutil.rmtree(place)
        os.rename(fetched, place)


def digest_of(folder: Path) -> str:
    """The digest of a complete drafter folder."""
    return (folder / artifact.MARKER).read_text().strip()


def require_loaded(staged_tensors: str, loaded_tensors: str, *, version: str | None) -> None:
    """Raise SwapFailedError unless the engine holds the tensors the manifest names."""
    if staged_tensors and staged_tensors != loaded_tensors:
        raise SwapFailedError(
            f"version {version}: the engine loaded tensors {loaded_tensors[:12] or 'unknown'}, "
            f"the manifest names {staged_tensors[:12]}"
        )


def require_same_outputs(before: ProbeResult, after: ProbeResult, compare: Compare, tie_margin: float) -> Ties:
    """The canary outputs that differ at a near tie of the target. Raises SwapFailedError for any other difference."""
    compared = compare(before, after, tie_margin)
    if not compared.lossless:
        raise SwapFailedError("the target's greedy outputs for the canary prompts changed with the swap")
    return tuple(compared.divergences)


def require_plausible(seen: SpecCounters, *, version: str | None) -> None:
    """Raise SwapFailedError if nothing was accepted, or everything: neither is a drafter at work."""
    if seen.num_steps <= 0 or seen.num_accepted <= 0:
        raise SwapFailedError(f"version {version}: no proposal was accepted in {seen.num_steps} probe steps")
    if seen.num_steps >= _MIN_SUSPICIOUS_STEPS and seen.num_accepted >= seen.num_drafted:
        raise SwapFailedError(
            f"version {version}: all {seen.num_drafted} proposals of {seen.num_steps} probe steps were accepted; "
            "no drafter is that good"
        )

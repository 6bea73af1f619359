"""From the outputs of a job's stages to the candidate the registry keeps: the signed numbers, told for a reviewer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import CheckpointError, SnapshotError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.registry import passport
from draftloop.pipeline.registry.registry import Candidate

if TYPE_CHECKING:
    from draftloop.pipeline.config import Config
    from draftloop.pipeline.judge.report import ReplayReport

_NO_CONTENT = ("topic", "offsets", "consent_policies", "parent")  # of a snapshot's source: what lineage may show


def candidate(
    job_key: str,
    outputs: Mapping[str, Mapping[str, Any]],
    *,
    challenger: ReplayReport,
    champion: ReplayReport,
    champion_version: str | None,
    config: Config,
    fingerprint: Fingerprint,
    peak_rss_mb: int,
) -> Candidate:
    """The candidate of a judged job. outputs: of the stages curate, train and gate.

    Raises SnapshotError, CheckpointError where a folder was altered since.
    """
    trained, document = outputs["train"], outputs["gate"]["verdict"]
    folder = Path(trained["folder"])
    drafter = artifact.verify(folder, kind="drafter", error=CheckpointError)
    snapshot = artifact.verify(Path(outputs["curate"]["folder"]), kind="snapshot", error=SnapshotError)
    lineage = {key: _told(snapshot["source"][key]) for key in _NO_CONTENT if snapshot["source"].get(key)}
    gain = _gain(document["evidence"], challenger, champion)
    settings = config.train.model_dump(mode="json", exclude_none=True)
    counts = outputs["curate"]["counts"]
    facts = passport.Facts(
        name=config.registry.name,
        job_key=job_key,
        digest=trained["digest"],
        decision=document["decision"],
        reasons=tuple(document["evidence"]["reasons"]),
        target=config.target.path,
        fingerprint=fingerprint.digest,
        snapshot_id=snapshot["id"],
        window=lineage,
        captured=counts["captured"],
        rejected=counts["rejected"],
        num_train=snapshot["counts"]["rows"]["train"],
        num_heldout=snapshot["counts"]["rows"]["heldout"],
        carried=sum(counts["carried"].values()),
        gain=gain,
        cost=passport.Cost(
            num_steps=trained["num_steps"],
            num_tokens=trained["num_tokens"],
            seconds=trained["seconds"],
            tokens_per_s=trained["tokens_per_s"],
            peak_memory_mb=peak_rss_mb,
        ),
        champion=champion_version,
        parents=tuple(drafter["parents"]),
        settings=settings,
    )
    return Candidate(
        job_key=job_key,
        folder=folder,
        digest=trained["digest"],
        verdict=document,
        description=passport.card(facts),
        tags=passport.tags(facts),
        params={f"train.{key}": _told(value) for key, value in settings.items()}
        | {"parent": champion_version or "none", "target": fingerprint.digest, "snapshot": snapshot["id"]},
        metrics=_metrics(gain, facts.cost),
        history=tuple(trained["history"]),
        plots=passport.plots(gain, trained["history"]),
        tables={"slices.json": passport.slice_table(gain.slices)} if gain.slices else {},
        snapshot_id=snapshot["id"],
        snapshot_source=lineage,
    )


def _gain(evidence: Mapping[str, Any], challenger: ReplayReport, champion: ReplayReport) -> passport.Gain:
    """The verdict's own numbers: what the reviewer reads is what was signed."""
    overall = evidence["comparison"]
    slices = tuple(
        passport.SliceRow(
            name=row["value"],
            challenger_tau=row["challenger_tau"],
            champion_tau=row["champion_tau"],
            ratio=row["comparison"]["ratio"],
            low=row["comparison"]["low"],
            high=row["comparison"]["high"],
            num_conversations=row["comparison"]["num_conversations"],
            judged=row["judged"],
            lost=row["lost"],
        )
        for row in evidence["slices"]
    )
    return passport.Gain(
        challenger_tau=evidence["challenger_tau"],
        champion_tau=evidence["champion_tau"],
        ratio=overall["ratio"],
        low=overall["low"],
        high=overall["high"],
        confidence=overall["confidence"],
        num_conversations=overall["num_conversations"],
        num_tokens=overall["num_tokens"],
        challenger_rates=challenger.position_rates,
        champion_rates=champion.position_rates,
        slices=slices,
    )


def _metrics(gain: passport.Gain, cost: passport.Cost) -> dict[str, float]:
    return {
        "replay.tau": gain.challenger_tau,
        "replay.champion_tau": gain.champion_tau,
        "replay.ratio": gain.ratio,
        "replay.ratio_low": gain.low,
        "replay.ratio_high": gain.high,
        "cost.seconds": cost.seconds,
        "cost.tokens": cost.num_tokens,
        "cost.tokens_per_s": cost.tokens_per_s,
        "cost.peak_memory_mb": cost.peak_memory_mb,
    } | {f"replay.position_{place}": rate for place, rate in enumerate(gain.challenger_rates, start=1)}


def _told(value: object) -> str:
    """A manifest's value in one line: {"0": [0, 90]} as `0:0-90`."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{_told(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return "-".join(str(part) for part in value)
    return str(value)

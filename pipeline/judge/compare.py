"""`draftloop replay --snapshot DIR --drafter DIR...`: drafters side by side on one snapshot's held-out requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from draftloop.pipeline.data.snapshot import open_snapshot
from draftloop.pipeline.judge.statistics import paired_bootstrap
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.workspace import Workspace

if TYPE_CHECKING:
    from draftloop.pipeline.judge.replay import Candidate


def compare(workspace: Workspace, snapshot_folder: Path, drafters: Sequence[Path], screen: Screen) -> dict[str, Any]:
    """Replay each drafter, no drafter and the n-gram floor; every drafter after the first is compared with the first.

    Raises SnapshotError, CheckpointError, FingerprintMismatchError.
    """
    from draftloop.pipeline.judge.replay import replay
    from draftloop.trainers.checkpoint import open_drafter

    snapshot = open_snapshot(snapshot_folder)
    target = workspace.load_target()
    config = workspace.config
    candidates: dict[str, Candidate] = {"none": None, "ngram": "ngram"}
    for folder in drafters:
        candidates[str(folder)] = open_drafter(folder, fingerprint=target.fingerprint, dtype=target.embedding.dtype)
    rows = snapshot.rows("heldout")
    with screen.bar("replay", len(rows)) as advance:
        reports = replay(
            target,
            candidates,
            rows,
            k=config.replay.num_speculative_tokens,
            snapshot_id=snapshot.id,
            batch_tokens=config.replay.batch_tokens,
            on_progress=lambda seen: advance(seen.num_requests, f"{seen.num_tokens} tokens"),
        )
    first = str(drafters[0]) if drafters else "none"
    comparisons = {
        str(folder): msgspec.to_builtins(paired_bootstrap(reports[str(folder)], reports[first], seed=config.seed))
        for folder in drafters[1:]
    }
    return {
        "snapshot": snapshot.id,
        "k": config.replay.num_speculative_tokens,
        "drafters": {
            name: {
                "tau": report.tau,
                "accepted": report.tau - 1,
                "position_rates": list(report.position_rates),
                "conditional_rates": list(report.conditional_rates),
                "by_slice": report.tau_by_slice(config.gate.slice_key or "domain"),
            }
            for name, report in reports.items()
        },
        "compared_with": first,
        "comparisons": comparisons,
    }


def table(result: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [f"snapshot {result['snapshot']}, K = {result['k']}; tau includes the bonus token"]
    for name, row in result["drafters"].items():
        rates = " ".join(f"{rate:.2f}" for rate in row["conditional_rates"])
        slices = ", ".join(f"{value} {tau:.3f}" for value, tau in row["by_slice"].items())
        lines.append(f"{name}: tau {row['tau']:.3f}   conditional {rates}   {slices}")
    for name, row in result["comparisons"].items():
        lines.append(f"{name} / {result['compared_with']}: {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})")
    return "\n".join(lines)

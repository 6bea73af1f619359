"""What each stage of a job does. A stage returns a small JSON-able dict; what is large lies in a folder it names."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from draftloop.pipeline import artifact
from draftloop.pipeline.data.curate import Window, curate, publish_curated
from draftloop.pipeline.data.dlq import dead_letter
from draftloop.pipeline.data.snapshot import Snapshot, open_snapshot
from draftloop.pipeline.errors import CheckpointError, InputError, SwapRefusedError
from draftloop.pipeline.registry.registry import Registry, Version, fetch_once
from draftloop.pipeline.stream.audit import LogAudit, audited
from draftloop.pipeline.stream.log import CaptureLog
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.workspace import Workspace

if TYPE_CHECKING:
    from draftloop.pipeline.judge.report import ReplayReport
    from draftloop.trainers.target import Target

Outputs = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class JobContext:
    """What every stage of one job is told."""

    key: str
    folder: Path
    window: Window
    parent: str | None  # champion version
    seed: int
    log: CaptureLog
    screen: Screen


class Stages(Protocol):
    """The loop's seam to its stages; tests run the loop over a twin that records."""

    def run(self, name: str, context: JobContext, outputs: Outputs) -> dict[str, Any]: ...

    def champion(self) -> Version | None: ...

    def fingerprint_digest(self) -> str: ...


class LoopStages:
    """The real stages over one workspace; the target is loaded once, when first needed."""

    def __init__(self, workspace: Workspace, registry: Registry, target: Target | None = None) -> None:
        self._workspace = workspace
        self._registry = registry
        self._target = target
        self._stages: dict[str, Callable[[JobContext, Outputs], dict[str, Any]]] = {
            "curate": self._curate,
            "train": self._train,
            "replay": self._replay,
            "gate": self._gate,
            "register": self._register,
            "promote": self._promote,
        }

    @property
    def target(self) -> Target:
        if self._target is None:
            self._target = self._workspace.load_target()
        return self._target

    def run(self, name: str, context: JobContext, outputs: Outputs) -> dict[str, Any]:
        return self._stages[name](context, outputs)

    def champion(self) -> Version | None:
        return self._registry.champion()

    def fingerprint_digest(self) -> str:
        return self.target.fingerprint.digest

    def _curate(self, context: JobContext, outputs: Outputs) -> dict[str, Any]:
        window = context.window
        offsets = {
            f"partition {number}": f"{window.start.get(number, 0)}..{stop}" for number, stop in window.stop.items()
        }
        with ExitStack() as held:
            with (
                audited(
                    LogAudit(context.log),
                    "window.read",
                    by=self._workspace.actor(),
                    subject=window.topic,
                    details={"job": context.key, **offsets},
                ),
                context.screen.bar("curate", window.num_entries) as read,
            ):
                work = curate(
                    context.log,
                    window,
                    beside=self._workspace.snapshots,
                    fingerprint=self.target.fingerprint,
                    config=self._workspace.config.curate,
                    carried=self._parent_snapshot(context),
                    on_progress=lambda done, total: read(done),
                )
                curated = held.enter_context(work)
            # Before the snapshot: a window of nothing but poison has none, and its poison is kept all the same.
            num_letters = dead_letter(context.log, curated.rejects(), window, to=self._workspace.dlq_topic())
            if num_letters:
                context.screen.say(
                    f"{num_letters} entries that are no records: copied to {self._workspace.dlq_topic()}"
                )
            with context.screen.bar("snapshot", curated.num_rows) as wrote:
                snapshot = publish_curated(
                    self._workspace.snapshots,
                    curated,
                    fingerprint=self.target.fingerprint,
                    on_progress=lambda done, total: wrote(done),
                )
        return {"snapshot": snapshot.id, "folder": str(snapshot.folder), "counts": dict(curated.counts)}

    def _parent_snapshot(self, context: JobContext) -> Snapshot | None:
        folder = self._parent_folder(context)
        if folder is None:
            return None
        snapshot_id = artifact.verify(folder, kind="drafter", error=CheckpointError)["snapshot_id"]
        known = self._workspace.snapshots / str(snapshot_id)
        return open_snapshot(known) if artifact.is_complete(known) else None

    def _parent_folder(self, context: JobContext) -> Path | None:
        """The parent champion's drafter."""
        if context.parent is None:
            return None
        return fetch_once(self._registry, context.parent, self._workspace.fetched(context.parent))

    def _train(self, context: JobContext, outputs: Outputs) -> dict[str, Any]:
        from draftloop.trainers.train import TrainJob, TrainProgress, launch

        config = self._workspace.config
        job = TrainJob(
            target=self.target.folder,
            target_dtype=config.target.dtype,
            snapshot=Path(outputs["curate"]["folder"]),
            parent=self._parent_folder(context),
            output=self._workspace.drafters / context.key,
            state=context.folder / "train-state",
            config=config.train.model_copy(update={"seed": context.seed}),
        )
        with context.screen.bar("train", 1) as advance:
            advance(0, "features of the target first")

            def show(seen: TrainProgress) -> None:
                tau = f", held-out tau {seen.heldout_tau:.2f}" if seen.heldout_tau is not None else ""
                advance.total(seen.num_steps)
                advance(seen.step, f"loss {seen.loss:.3f}, {seen.tokens_per_s:.0f} tokens/s{tau}")

            result = launch(job, target=self.target, on_progress=show)
        return {
            "folder": str(result.folder),
            "digest": result.digest,
            "num_steps": result.num_steps,
            "num_tokens": result.num_tokens,
            "seconds": result.seconds,
            "tokens_per_s": result.tokens_per_s,
            "heldout_tau": result.heldout_tau,
            "history": list(result.history),
        }

    def _replay(self, context: JobContext, outputs: Outputs) -> dict[str, Any]:
        from draftloop.pipeline.judge.replay import Candidate as DrafterChoice
        from draftloop.pipeline.judge.replay import replay
        from draftloop.trainers.checkpoint import open_drafter

        config = self._workspace.config.replay
        snapshot = open_snapshot(Path(outputs["curate"]["folder"]))
        fingerprint, dtype = self.target.fingerprint, self.target.embedding.dtype  # as the engine drafts
        parent = self._parent_folder(context)
        drafters: dict[str, DrafterChoice] = {
            "challenger": open_drafter(Path(outputs["train"]["folder"]), fingerprint=fingerprint, dtype=dtype),
            "champion": open_drafter(parent, fingerprint=fingerprint, dtype=dtype) if parent else self._floor(),
            "floor": "ngram",
        }
        rows = snapshot.rows("heldout")
        with context.screen.bar("replay", len(rows)) as advance:
            reports = replay(
                self.target,
                drafters,
                rows,
                k=config.num_speculative_tokens,
                snapshot_id=snapshot.id,
                batch_tokens=config.batch_tokens,
                on_progress=lambda seen: advance(seen.num_requests, f"{seen.num_tokens} tokens"),
            )
        for name, report in reports.items():
            artifact.write_json(context.folder / f"replay-{name}.json", json.loads(report.to_json()))
        return {
            name: {"tau": report.tau, "by_slice": report.tau_by_slice(self._workspace.config.gate.slice_key)}
            for name, report in reports.items()
        }

    def _floor(self) -> Literal["ngram"] | None:
        """What a challenger must beat where there is no champion: what the engine does without a drafter."""
        return "ngram" if self._workspace.config.engine.floor == "ngram" else None

    def report(self, folder: Path, name: str) -> ReplayReport:
        """A replay report of a job, from its folder. Raises InputError naming the file."""
        from draftloop.pipeline.judge.report import ReplayReport

        path = folder / f"replay-{name}.json"
        try:
            return ReplayReport.from_json(path.read_bytes())
        except (OSError, InputError) as error:
            reason = error.message if isinstance(error, InputError) else error.strerror
            raise InputError(
                f"{path}: {reason}", mend=f"remove it and {folder / 'replay.json'}, then run the same command again"
            ) from error

    def _gate(self, context: JobContext, outputs: Outputs) -> dict[str, Any]:
        from draftloop.pipeline.judge.gate import decide
        from draftloop.pipeline.judge.verdict import sign

        champion = self.report(context.folder, "champion")
        challenger = self.report(context.folder, "challenger")
        verdict = decide(challenger, champion, self._workspace.config.gate, context.seed)
        signed = sign(
            verdict,
            digest=outputs["train"]["digest"],
            fingerprint=self.target.fingerprint,
            snapshot_id=outputs["curate"]["snapshot"],
            champion_digest=champion.drafter_digest,
            job_key=context.key,
            key=self._workspace.signing_key(),
        )
        artifact.write_json(context.folder / "verdict.json", signed)
        for reason in verdict.reasons:
            context.screen.say(f"gate: {reason}")
        return {
            "passed": verdict.passed,
            "reasons": list(verdict.reasons),
            "comparison": signed["evidence"]["comparison"],
            "verdict": signed,
        }

    def _register(self, context: JobContext, outputs: Outputs) -> dict[str, Any]:
        from draftloop.pipeline.registry.evidence import candidate
        from draftloop.pipeline.signature import check

        try:  # the file may have been altered since the gate wrote it
            check(
                outputs["gate"].get("verdict") or {},
                self._workspace.signing_key().public_key(),
                digest=outputs["train"]["digest"],
                fingerprint=self.target.fingerprint,
            )
        except SwapRefusedError as error:
            path = context.folder / "gate.json"
            raise InputError(
                f"{path}: {error.message}", mend="remove the file and run the same command again: the gate decides anew"
            ) from error
        made = candidate(
            context.key,
            outputs,
            challenger=self.report(context.folder, "challenger"),
            champion=self.report(context.folder, "champion"),
            champion_version=context.parent,
            config=self._workspace.config,
            fingerprint=self.target.fingerprint,
            peak_rss_mb=peak_rss_mb(),
        )
        with context.screen.bar("register", 1) as advance:
            version = self._registry.register(made)
            advance(1, f"candidate {version.version}")
        return {"version": version.version}

    def _promote(self, context: JobContext, outputs: Outputs) -> dict[str, Any]:
        live = self._registry.champion()
        if live is not None and live.job_key == context.key:
            return {"promoted": True, "version": live.version}
        if not self._workspace.config.loop.auto_promote:
            candidate = outputs["register"]["version"]
            context.screen.say(f"candidate {candidate} waits for a reviewer: draftloop promote {candidate}")
            return {"promoted": False, "version": None}
        version = self._registry.promote(
            outputs["register"]["version"], by="policy", reason="loop.auto_promote and the gate passed"
        )
        return {"promoted": True, "version": version.version}


def peak_rss_mb() -> int:
    """Highest resident memory of this process and of its ended children, MB."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return int(max(own, children) // 1024)

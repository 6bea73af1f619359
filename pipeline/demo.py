"""The whole loop once on one machine: day 0, a first drafter, shifted traffic, a second drafter, a bad one taken back.

Every number in the result is measured in this run: by replay of held-out requests and by the live engine's counters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from draftloop.pipeline import artifact, demo_vllm
from draftloop.pipeline.config import Config, load
from draftloop.pipeline.data.snapshot import open_snapshot
from draftloop.pipeline.demo_log import demo_log
from draftloop.pipeline.errors import ConfigError, EngineError
from draftloop.pipeline.lease import lease
from draftloop.pipeline.loop import RunResult, run_once
from draftloop.pipeline.registry.registry import fetch_once
from draftloop.pipeline.service import HookLog, open_service
from draftloop.pipeline.stages import LoopStages, peak_rss_mb
from draftloop.pipeline.story import Cycle, Measured, Story
from draftloop.pipeline.traffic import CONSENTING, Domain, domain_requests, measured_again, requests_of
from draftloop.pipeline.ui import Bar, Screen
from draftloop.pipeline.vllm_service import VllmService, require_engine
from draftloop.pipeline.workspace import Workspace

if TYPE_CHECKING:
    from draftloop.pipeline.data.snapshot import Row
    from draftloop.pipeline.registry.registry import Registry
    from draftloop.pipeline.rollout.agent import Outcome
    from draftloop.serving_hooks.embedded.types import Completion, Request

DOMAIN_A: Domain = "kitchen"
DOMAIN_B: Domain = "python"
LEVEL_REQUESTS = 16
NUM_ABORTED = 3
POINT = 32  # requests between two points of the tau-over-time plot

# What the demo sets before the user's own files and overrides: its tenants, and no reviewer to wait for.
DEFAULTS = [
    'consent.version="demo-1"',
    f'consent.tenants.{CONSENTING}.purpose="train"',
    "loop.auto_promote=true",
    'engine.floor="none"',  # so that day 0 is tau 1.0; the floor is measured by replay instead
]


def demo_config(files: list[Path], overrides: list[str], target: str | None) -> Config:
    """The demo's configuration: its defaults, the files, then the overrides."""
    extra = [f"target.path={json.dumps(target)}"] if target else []
    config = load(files, [*overrides, *extra], base=DEFAULTS)
    if config.engine.kind != "vllm":
        return config
    return load(files, [*overrides, *extra], base=[*DEFAULTS, *demo_vllm.DEFAULTS])


def run_demo(workspace: Workspace, screen: Screen) -> dict[str, Any]:
    """Run the demo in its work folder; a second run there goes on with what is live. Returns the --json object."""
    started = time.monotonic()
    if workspace.config.engine.kind == "vllm":
        require_engine(workspace.config)  # before a broker is started for nothing
    with (
        lease(workspace.root / "demo.lock", what="demo"),
        demo_log(workspace, screen) as (workspace, hook_log),
    ):
        screen.rule("target")
        demo = Demo(workspace, screen, hook_log)
        try:
            demo.play()
        finally:
            demo.close()
        artifact.write_json(workspace.root / "demo.json", {"rounds": demo.round_number + 1})
    result = {
        **asdict(demo.story),
        "seconds": round(time.monotonic() - started, 1),
        "peak_rss_mb": peak_rss_mb(),
        "round": demo.round_number,
        "report": str(workspace.root / "report.html"),
    }
    from draftloop.pipeline.report import closing_table, write_report

    write_report(workspace.root / "report.html", result)
    closing_table(result)
    return result


def _rounds_played(state: Path) -> int:
    if not state.is_file():
        return 0
    try:
        return int(json.loads(state.read_bytes())["rounds"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{state} does not say how many rounds were played", mend="remove the file") from error


class Demo:
    """The story's actors: one engine that stays up throughout, the loop, and the agent between them."""

    def __init__(self, workspace: Workspace, screen: Screen, hook_log: HookLog) -> None:
        from draftloop.pipeline.rollout.agent import Agent
        from draftloop.pipeline.signature import check

        self.workspace, self.screen = workspace, screen
        config = workspace.config
        self.story = Story(engine=config.engine.kind)
        self.round_number = _rounds_played(workspace.root / "demo.json")
        self.target = workspace.load_target()
        screen.say(f"{self.target.folder}, fingerprint {self.target.fingerprint.digest}")
        self.registry: Registry = workspace.open_registry()
        self.stages = LoopStages(workspace, self.registry, self.target)
        self.service = open_service(workspace, self.target, hook_log)
        self.engine = self.service.client
        key = workspace.signing_key().public_key()

        def check_verdict(document: dict[str, Any], digest: str, fingerprint_digest: str) -> None:
            check(document, key, digest=digest, fingerprint=fingerprint_digest)

        canaries = domain_requests(self.target, DOMAIN_A, count=4, round_number=0, seed=config.seed, max_tokens=16)
        canaries += domain_requests(self.target, DOMAIN_B, count=4, round_number=0, seed=config.seed, max_tokens=16)
        self.agent = Agent(
            self.engine,
            self.registry,
            workspace.staging,
            check_verdict=check_verdict,
            canary_prompts=[request.prompt_ids for request in canaries],
            config=config.agent,
            audit=workspace.audit(),
        )

    def close(self) -> None:
        """Stop the engine and deliver what the hook still holds."""
        self.service.stop()

    def play(self) -> None:
        """The story, in order."""
        self.service.start(self.screen.say)
        if (self.workspace.jobs / "current.json").is_file():
            self.screen.rule("an interrupted job is finished first")
            run_once(self.workspace, self.stages, self.screen)
        self.agent.reconcile()  # a restarted engine boots with the champion
        live = self.engine.drafter_version()
        self.screen.rule(f"day {self.round_number}: traffic in {DOMAIN_A}, drafter {live or 'none'}")
        self._serve(self._requests(DOMAIN_A), DOMAIN_A)
        self.screen.rule(f"cycle 1: retrain on {DOMAIN_A}")
        self._cycle(DOMAIN_A)
        self.screen.rule(f"the traffic shifts to {DOMAIN_B}")
        self._serve(self._requests(DOMAIN_B), DOMAIN_B)
        if isinstance(self.service, VllmService):
            self.story.replayed = demo_vllm.replay_captured(
                self.workspace, self.target, self._live_drafter(), self.engine.drafter_version(), self.screen
            )
        self.screen.rule(f"cycle 2: warm start, a share of {DOMAIN_A} kept")
        self._cycle(DOMAIN_B)
        self.screen.rule("a damaged drafter is promoted")
        self._damage()
        self.story.capture = self.service.captured()
        if isinstance(self.service, VllmService):
            self.screen.rule("the server is restarted")
            self.story.restart = demo_vllm.restart(self.service, self.registry, self.screen)

    def _requests(self, domain: Domain) -> list[Request]:
        config = self.workspace.config
        count = config.demo.first_requests if domain == DOMAIN_A else config.demo.shifted_requests
        return domain_requests(
            self.target,
            domain,
            count=count,
            round_number=self.round_number,
            seed=config.seed,
            max_tokens=config.demo.max_tokens,
        )

    def _serve(self, requests: Sequence[Request], domain: str) -> list[Completion]:
        """Serve traffic, one point of the timeline a chunk, and wait until the log has it."""
        completions: list[Completion] = []
        with self.screen.bar(f"serve {domain}", len(requests)) as advance:
            for first in range(0, len(requests), POINT):
                completions += self._generate(requests[first : first + POINT], domain)
                point = self.story.timeline[-1]
                advance(len(completions), f"tau {point['tau']:.2f}, {point['tokens_per_s']:.0f} tokens/s")
        # Clients that go away: captured as aborted, not trained on. After the traffic, so that it stays the same.
        for request in requests[:NUM_ABORTED]:
            self.service.hang_up(request)
        self.service.flush()
        return completions

    def _generate(self, requests: Sequence[Request], domain: str) -> list[Completion]:
        """Serve requests: one point of the timeline."""
        before, began = self.engine.counters(), time.monotonic()
        done = self.service.generate(requests)
        seen, seconds = self.engine.counters().since(before), time.monotonic() - began
        timeline = self.story.timeline
        timeline.append(
            {
                "requests": len(requests) + (timeline[-1]["requests"] if timeline else 0),
                "domain": domain,
                "tau": seen.tau,
                "version": self.engine.drafter_version(),
                "tokens_per_s": sum(len(one.output_ids) for one in done) / seconds,
            }
        )
        return done

    def _cycle(self, domain: Domain) -> None:
        """run-once, swap under load, watch, and measure what it brought."""
        result = run_once(self.workspace, self.stages, self.screen)
        outputs = result.details or {}
        if not outputs:
            self.screen.say(f"no cycle: {result.reason}")
            return
        swap = self._swap_under_load(domain) if result.outcome == "promoted" else None
        heldout = [
            row
            for row in open_snapshot(Path(outputs["curate"]["folder"])).rows("heldout")
            if row.slices.get("domain") == domain
        ]
        cycle = self._summarise(domain, result, outputs, self._measure_heldout(heldout, domain))
        if swap is not None:
            cycle.swap_ms = swap.swap_ms
            cycle.near_ties = [tie._asdict() for tie in swap.near_ties or ()]
            # The agent lets no other difference than a near tie of the two best tokens pass.
            cycle.outputs_identical = swap.near_ties is not None
        if domain == DOMAIN_B:  # once, at the end: it takes a minute of the machine
            cycle.speed = self._speed(heldout)
        self.story.cycles.append(cycle)
        self._count(outputs["curate"]["counts"])
        assert result.folder is not None
        for name in ("champion", "challenger"):
            report = self.stages.report(result.folder, name)
            self.story.positions[f"cycle {len(self.story.cycles)}: {name}"] = list(report.position_rates)

    def _summarise(self, domain: Domain, result: RunResult, outputs: dict[str, Any], measured: Measured) -> Cycle:
        replayed = outputs["replay"]
        before, after = replayed["champion"]["by_slice"], replayed["challenger"]["by_slice"]
        comparison = outputs["gate"]["comparison"]
        return Cycle(
            domain=domain,
            tau_before=before[domain],
            tau_after=after[domain],
            tau_engine=measured.engine,
            tau_counted=measured.counted,
            tau_replay_of_engine=measured.replayed,
            tau_floor=replayed["floor"]["by_slice"][domain],
            interval=(comparison["low"], comparison["high"]),
            verdict=result.outcome,
            reasons=outputs["gate"]["reasons"],
            swap_ms=None,
            outputs_identical=None,
            near_ties=None,
            by_domain={name: {"before": before[name], "after": after[name]} for name in sorted(after)},
            train={
                key: outputs["train"][key] for key in ("num_steps", "num_tokens", "seconds", "tokens_per_s", "history")
            },
        )

    def _swap_under_load(self, domain: Domain) -> Outcome:
        """The agent swaps while requests run; they must all finish, and the watch must pass on live traffic."""
        requests = measured_again(self._requests(domain)[:8], f"during-{len(self.story.cycles)}")
        with self.service.under_load(requests) as load:
            outcome = self.agent.reconcile()
        if outcome.swap_ms is None or outcome.state != "WATCHING":
            raise EngineError(f"the promoted drafter did not get in: {outcome.reason}")
        finished = load.completions
        cut = [done.request_id for done in finished if done.finish_reason == "abort"]
        if cut:
            raise EngineError(f"requests {cut} were cut by the swap")
        self.screen.say(
            f"swapped to version {outcome.version} in {outcome.swap_ms:.0f} ms while {len(finished)} requests ran"
        )
        self._watch(domain, f"watch-{len(self.story.cycles)}")
        return outcome

    def _watch(self, domain: Domain, label: str) -> str:
        """Serve live requests until the agent has made up its mind. Returns its state."""
        config = self.workspace.config.demo
        requests = self._requests(domain)
        state = "WATCHING"
        with self.screen.bar("watch live traffic", config.watch_requests) as advance:
            for first in range(0, config.watch_requests, 8):
                self._generate(measured_again(requests[first : first + 8], label), domain)
                outcome = self.agent.reconcile()
                state = outcome.state
                advance(min(first + 8, config.watch_requests), state)
                if state != "WATCHING":
                    break
        return state

    def _measure_heldout(self, rows: Sequence[Row], domain: str) -> Measured:
        """tau of the live drafter on held-out requests: by the engine's counters, and by replay of what it wrote."""
        from draftloop.pipeline.data.snapshot import Row as SnapshotRow
        from draftloop.pipeline.judge.replay import replay

        before, counted_before = self.engine.counters(), self.service.counted()
        completions = self._generate(requests_of(rows, max_tokens=self.workspace.config.demo.max_tokens), domain)
        tau_engine, counted = self.engine.counters().since(before).tau, self.service.counted()
        live = self._live_drafter()
        written = [
            SnapshotRow(done.request_id, done.request_id, list(done.prompt_ids), list(done.output_ids), {}, 0.0, [])
            for done in completions
        ]
        config = self.workspace.config.replay
        reports = replay(self.target, {"live": live}, written, k=config.num_speculative_tokens, snapshot_id="live")
        by_counters = counted.since(counted_before).tau if counted and counted_before else None
        return Measured(tau_engine, by_counters, reports["live"].tau)

    def _live_drafter(self) -> Any:
        from draftloop.trainers.checkpoint import open_drafter

        folder = self._live_folder()
        if folder is None:
            return None
        return open_drafter(folder, fingerprint=self.target.fingerprint, dtype=self.target.embedding.dtype)

    def _live_folder(self) -> Path | None:
        """Where the drafter lies that serves now."""
        version = self.engine.drafter_version()
        if version is None:
            return None
        staged = self.workspace.staging / "drafters" / version  # the first one of a server is in no registry
        if artifact.is_complete(staged):
            return staged
        return fetch_once(self.registry, version, self.workspace.fetched(version))

    def _speed(self, heldout: Sequence[Row]) -> dict[str, Any] | None:
        """Wall-clock tokens/s with and without the live drafter, interleaved in this run."""
        from draftloop.pipeline.judge.speed import SpeedProgress, measure

        version, folder = self.engine.drafter_version(), self._live_folder()
        if version is None or folder is None:
            return None
        config = self.workspace.config.demo
        measured: dict[str, Any] = {}
        with self.service.speed() as engine:
            for batch in (1, 8):
                requests = requests_of(heldout[: max(2, batch)], max_tokens=config.speed_tokens)
                with self.screen.bar(f"speed at batch {batch}", 1) as advance:

                    def show(seen: SpeedProgress, advance: Bar = advance) -> None:
                        advance.total(seen.total_runs)
                        advance(seen.runs)

                    pairs = config.speed_pairs
                    report = measure(
                        engine, (folder, version), requests, batches=(batch,), pairs=pairs, on_progress=show
                    )
                measured[str(batch)] = msgspec.to_builtins(report.results[0])
        return measured

    def _damage(self) -> None:
        """Promote a drafter with noise in its weights under a signed override, and let production disagree."""
        from draftloop.pipeline.damage import damaged_candidate

        good = self.registry.champion()
        if good is None:
            self.screen.say("no champion to damage: the gate refused both cycles")
            return
        # What the good drafter reaches in production: the level a successor is held against.
        level = measured_again(self._requests(DOMAIN_B)[:LEVEL_REQUESTS], f"level-{self.round_number}")
        self._generate(level, DOMAIN_B)
        self.agent.reconcile()
        candidate = damaged_candidate(
            self.workspace, self.registry, good, self.target, f"{self.round_number}-{good.version}"
        )
        version = self.registry.register(candidate)
        bad = self.registry.promote(version.version, by="demo operator", reason="promoted by hand, without evidence")
        swapped = self.agent.reconcile()
        self.screen.say(f"version {bad.version} is in: {swapped.reason}")
        if swapped.state == "ROLLED_BACK":  # the probe was enough; only the watch moves the alias by itself
            self.registry.set_champion(good.version, by="demo operator", reason=swapped.reason)
            self.agent.reconcile()
        state = swapped.state if swapped.state != "WATCHING" else self._watch(DOMAIN_B, f"damaged-{self.round_number}")
        live = self.registry.champion()
        self.story.rolled_back = (
            live is not None and live.version == good.version and self.engine.drafter_version() == good.version
        )
        self.story.damaged = {"version": bad.version, "state": state, "reason": self.agent.last_reason}
        fate = "was taken back" if self.story.rolled_back else "was NOT taken back in the traffic there was"
        self.screen.say(f"version {bad.version} {fate}: {self.agent.last_reason}")

    def _count(self, counts: dict[str, Any]) -> None:
        total = self.story.counts
        total["captured"] += counts["captured"]
        total["kept"] += counts["kept"]
        for reason, number in counts["rejected"].items():
            total["rejected"][reason] = total["rejected"].get(reason, 0) + number

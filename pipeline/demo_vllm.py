"""What the demo plays on a real vLLM server beyond its story: replay against emitted tokens, and the restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftloop.pipeline.data.snapshot import Row
from draftloop.pipeline.records import CapturedRequest, decode, unpack_ids
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.workspace import Workspace

if TYPE_CHECKING:
    from draftloop.pipeline.registry.registry import Registry
    from draftloop.pipeline.vllm_service import VllmService
    from draftloop.trainers.checkpoint import Drafter
    from draftloop.trainers.target import Target

# Beside the demo's own defaults: fewer requests of day 0, when a drafter that knows nothing slows the server down, and
# enough of the second domain for the comparison of replay and engine.
DEFAULTS = ["demo.first_requests=200", "demo.shifted_requests=220"]


def restart(service: VllmService, registry: Registry, screen: Screen) -> dict[str, Any]:
    """Stop the server and start it again with the same flags: it boots with the champion, not its first drafter."""
    champion = registry.champion()
    seconds = service.restart()
    version = service.client.drafter_version()
    wanted = champion.version if champion is not None else None
    screen.say(f"restarted in {seconds:.0f} s: it boots with version {version}, the champion is {wanted}")
    return {"seconds": seconds, "version": version, "champion": wanted, "boots_with_champion": version == wanted}


def replay_captured(
    workspace: Workspace, target: Target, live: Drafter | None, version: str | None, screen: Screen
) -> dict[str, Any] | None:
    """tau of captured greedy requests of one drafter: by replay, and by what the engine emitted a draft step.

    None where there are none.
    """
    from draftloop.pipeline.judge.replay import replay

    records = [record for record in _captured(workspace) if _counts(record, version)]
    if live is None or not records:
        return None
    rows = [
        Row(
            record.record_id,
            record.conversation_id,
            unpack_ids(record.prompt_ids),
            unpack_ids(record.output_ids),
            dict(record.slices),
            0.0,
            [],
        )
        for record in records
    ]
    config = workspace.config.replay
    with screen.bar("replay captured requests", len(rows)) as advance:
        report = replay(
            target,
            {"live": live},
            rows,
            k=config.num_speculative_tokens,
            snapshot_id="captured",
            batch_tokens=config.batch_tokens,
            on_progress=lambda seen: advance(seen.num_requests),
        )["live"]
    steps = sum(len(record.accepted) for record in records)
    emitted = sum(len(row.output_ids) - 1 for row in rows) / steps
    screen.say(
        f"{len(rows)} captured requests of version {version}: tau {report.tau:.4f} by replay, "
        f"{emitted:.4f} emitted a step ({report.tau / emitted - 1:+.2%})"
    )
    return {
        "version": version,
        "num_requests": len(rows),
        "num_tokens": report.num_tokens,
        "tau_replayed": report.tau,
        "tau_emitted": emitted,
        "steps_replayed": report.num_steps,
        "steps_engine": steps,
        "difference": report.tau / emitted - 1,
    }


def _captured(workspace: Workspace) -> list[CapturedRequest]:
    log = workspace.open_log(make_topics=False)
    topic = workspace.raw_topic()
    try:
        starts = log.start_offsets(topic)
        return [
            decode(entry.value)
            for partition, stop in log.end_offsets(topic).items()
            for entry in log.read(topic, partition, starts[partition], stop)
        ]
    finally:
        log.close()


def _counts(record: CapturedRequest, version: str | None) -> bool:
    return (
        record.drafter_version == version
        and "drafter" not in record.slices  # another one drafted for a part of it
        and record.finish_reason != "abort"
        and record.sampling.temperature == 0
        and bool(record.accepted)
    )

"""The demo's bad drafter: noise on the champion's matrices, refused by the gate, promoted by a signed override."""

from __future__ import annotations

import torch

from draftloop.pipeline.data.snapshot import open_snapshot
from draftloop.pipeline.judge.gate import decide
from draftloop.pipeline.judge.replay import replay
from draftloop.pipeline.judge.verdict import describe, override, sign
from draftloop.pipeline.registry.registry import Candidate, Registry, Version, fetch_once
from draftloop.pipeline.workspace import Workspace
from draftloop.trainers.checkpoint import open_drafter, publish_drafter
from draftloop.trainers.target import Target

NUM_REPLAYED = 40


def damaged_candidate(
    workspace: Workspace, registry: Registry, champion: Version, target: Target, label: str
) -> Candidate:
    """A candidate made of the champion's weights plus seeded noise of `demo.damage` times each matrix's own spread."""
    config = workspace.config
    good_folder = fetch_once(registry, champion.version, workspace.fetched(champion.version))
    good = open_drafter(good_folder, fingerprint=target.fingerprint, dtype=target.embedding.dtype)
    bad_model = open_drafter(good_folder, fingerprint=target.fingerprint).model
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for parameter in bad_model.parameters():
            if parameter.dim() == 2 and parameter is not bad_model.lm_head.weight:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(config.demo.damage * parameter.std() * noise)
    folder = workspace.drafters / f"damaged-{label}"
    digest = publish_drafter(
        folder,
        bad_model,
        fingerprint=target.fingerprint,
        snapshot_id=good.manifest.snapshot_id,
        parents=[good.digest, *good.manifest.parents],
        training={"damage": config.demo.damage},
    )
    assert good.manifest.snapshot_id is not None
    snapshot = open_snapshot(workspace.snapshots / good.manifest.snapshot_id)
    rows = snapshot.rows("heldout")[-NUM_REPLAYED:]
    bad = open_drafter(folder, fingerprint=target.fingerprint, dtype=target.embedding.dtype)
    reports = replay(
        target,
        {"challenger": bad, "champion": good},
        rows,
        k=config.replay.num_speculative_tokens,
        snapshot_id=snapshot.id,
    )
    verdict = decide(reports["challenger"], reports["champion"], config.gate, config.seed)
    key = workspace.signing_key()
    refused = sign(
        verdict,
        digest=digest,
        fingerprint=target.fingerprint,
        snapshot_id=snapshot.id,
        champion_digest=champion.digest,
        job_key=f"damaged-{label}",
        key=key,
    )
    forced = override(refused, by="demo operator", reason="shows what the agent does with a bad drafter", key=key)
    return Candidate(
        job_key=f"damaged-{label}",
        folder=folder,
        digest=digest,
        verdict=forced,
        description=f"# A damaged drafter\n\nNoise on version {champion.version}, on purpose.\n\n{describe(forced)}",
        tags={"gate.status": "override", "target": target.fingerprint.digest},
        params={"damage": config.demo.damage, "parent": champion.version},
        metrics={"tau": reports["challenger"].tau, "champion_tau": reports["champion"].tau},
        history=(),
        plots={},
        tables={},
        snapshot_id=snapshot.id,
        snapshot_source={"topic": workspace.raw_topic()},
    )

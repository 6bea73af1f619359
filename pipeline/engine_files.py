"""What a vLLM server needs before its first start: fingerprint, first drafter, settings, token, flags."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftloop.pipeline import artifact
from draftloop.pipeline.data.prompts import DOMAINS, prompts
from draftloop.pipeline.errors import ConfigError, StorageError
from draftloop.pipeline.rollout.journal import BOOT, Journal
from draftloop.pipeline.vllm_server import write_serving
from draftloop.pipeline.workspace import Workspace
from draftloop.serving_hooks.vllm.settings import CaptureSettings, SwapSettings

if TYPE_CHECKING:
    from draftloop.trainers.target import Target


@dataclass(frozen=True)
class EngineFiles:
    """Where everything lies, and how the server is started."""

    settings: Path
    token: Path
    fingerprint: Path
    flags: Path
    agent: Path  # a TOML layer for `draftloop agent`
    live: Path
    command: str

    def to_dict(self) -> dict[str, str]:
        """For --json."""
        return {key: str(value) for key, value in asdict(self).items()}


def write_fingerprint(workspace: Workspace, out: Path) -> str:
    """Write the target's fingerprint as the plug-in reads it; return its digest. Raises ModelNotFoundError."""
    fingerprint = workspace.load_target().fingerprint
    artifact.write_json(out, fingerprint.to_dict())
    return fingerprint.digest


def make_first_drafter(workspace: Workspace, out: Path, target: Target | None = None) -> str:
    """Publish an untrained drafter in the shapes that training keeps; return its digest. A server boots with it.

    The agent's link `live` is made to name it where it lies in the agent's folder and nothing is live. Raises
    ModelNotFoundError, CheckpointError, StorageError.
    """
    from draftloop.trainers.checkpoint import publish_drafter
    from draftloop.trainers.start import first_drafter

    target = target or workspace.load_target()
    texts = [text for domain in DOMAINS for text in prompts(domain)]
    outputs = [target.tokenizer(text)["input_ids"] for text in texts]
    digest = publish_drafter(
        out,
        first_drafter(target, outputs, workspace.config.train),
        fingerprint=target.fingerprint,
        snapshot_id=None,
        parents=[],
        training=_training(target, workspace),
    )
    _boot_link(Journal(workspace.staging), out)
    return digest


def write_engine_files(workspace: Workspace, out: Path) -> EngineFiles:
    """Write serving.toml, admin token, fingerprint, flags and agent.toml into `out`. Existing secrets stay.

    Raises ModelNotFoundError, ConfigError (a path that flags cannot carry), StorageError.
    """
    config, staging = workspace.config, workspace.staging.absolute()
    if config.log.kind == "kafka":
        config.log.kafka.required()
        capture = CaptureSettings(topic=workspace.raw_topic(), kafka=config.log.kafka, limits=config.capture)
    else:
        workspace.open_log().close()  # makes the topic: a hook makes none
        database = workspace.root.absolute() / "capture.db"
        capture = CaptureSettings(topic=workspace.raw_topic(), sqlite=database, limits=config.capture)
    workspace.signing_key()  # made on first use, and with it the public half
    journal = Journal(staging)
    flags = _flags(journal.live, config.replay.num_speculative_tokens, config.target.dtype)
    fingerprint = workspace.load_target().fingerprint
    files = write_serving(
        out,
        fingerprint,
        consent=config.consent,
        capture=capture,
        swap=SwapSettings(
            staging=journal.drafters,
            public_key=config.replica.public_key or workspace.root.absolute() / "gate.key.pub",
            audit_file=staging / "engine-audit.jsonl",
        ),
    )
    written, beside = out.absolute() / "flags", out.absolute() / "agent.toml"
    try:
        written.write_text(flags + "\n")
        beside.write_text(_agent_layer(workspace, files.token))
    except OSError as error:
        raise StorageError(f"cannot write {written}: {error.strerror}", mend="free disk space") from error
    _boot_link(journal, journal.drafters / BOOT)
    target = "TARGET" if config.target.path == "smollm2" else config.target.path
    command = f"DRAFTLOOP_SERVING={files.settings} VLLM_PLUGINS=draftloop vllm serve {target} $(cat {written})"
    return EngineFiles(files.settings, files.token, files.fingerprint, written, beside, journal.live, command)


def _agent_layer(workspace: Workspace, token: Path) -> str:
    """What the agent must know of this server; JSON strings are TOML's too."""
    told = {"url": workspace.config.replica.url, "token_file": str(token), "staging": str(workspace.staging.absolute())}
    lines = [f"work = {json.dumps(str(workspace.root.absolute()), ensure_ascii=False)}", "", "[replica]"]
    return (
        "\n".join([*lines, *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in told.items())]) + "\n"
    )


def _flags(live: Path, num_speculative_tokens: int, dtype: str) -> str:
    """The flags as a shell splits them: no blank inside any."""
    speculative = {"method": "eagle3", "model": str(live), "num_speculative_tokens": num_speculative_tokens}
    parts = {
        "--dtype": dtype,
        "--speculative-config": json.dumps(speculative, separators=(",", ":")),
        "--weight-transfer-config": '{"backend":"draft_disk"}',
        "--per-request-spec-decode-metrics": "detailed",
    }
    if any(set(value) & set(" \t\n*?[]'\"\\$`") - {'"'} for value in parts.values()):
        raise ConfigError(f"replica.staging = {live.parent}: a blank or a special sign", mend="choose a plain path")
    return " ".join(f"{flag} {value}" for flag, value in parts.items())


def _boot_link(journal: Journal, drafter: Path) -> None:
    place = journal.drafters / BOOT
    if journal.live_version() is None and artifact.is_complete(place) and drafter.resolve() == place.resolve():
        journal.point_live(BOOT)


def _training(target: Target, workspace: Workspace) -> dict[str, object]:
    return {
        "target": target.folder,
        "target_architecture": type(target.model).__name__,
        "num_speculative_tokens": workspace.config.train.ttt_steps,  # as training writes it: engines compare it
        "num_steps": 0,
    }

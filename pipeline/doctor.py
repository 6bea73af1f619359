"""Checks what a run needs before it needs it, each with its mend."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable
from typing import Any, Literal

from draftloop.pipeline.config import without_userinfo
from draftloop.pipeline.errors import DraftloopError
from draftloop.pipeline.stream.audit import AUDIT_TOPIC
from draftloop.pipeline.workspace import Workspace

NEEDED = {
    "torch": "pip install 'draftloop[train]'",
    "transformers": "pip install 'draftloop[train]'",
    "accelerate": "pip install 'draftloop[train]'",
    "datasets": "pip install 'draftloop[train]'",
    "deepspeed": "pip install 'draftloop[train]' (needed for train.deepspeed only)",
    "mlflow": "pip install 'draftloop[mlflow]'",
    "cryptography": "pip install 'draftloop[mlflow]'",
}
NEEDED_FOR_KAFKA = {
    "kafka-python": "pip install 'draftloop[kafka]'",
    "crc32c": "pip install 'draftloop[kafka]' (without it every record costs 30 times as much)",
    "zstandard": "pip install 'draftloop[kafka]'",
}
MIN_FREE_GB = 2.0


Part = Literal["loop", "hook", "agent"]
# What each part of a deployment needs where it runs; its Kafka user sees no more.
CHECKS: dict[Part, tuple[str, ...]] = {
    "loop": ("work folder", "broker", "secrets", "capture log", "audit topic", "registry", "target"),
    "hook": ("broker", "secrets", "capture log"),
    "agent": ("work folder", "broker", "secrets", "audit topic", "registry"),
}
PACKAGES: dict[Part, frozenset[str]] = {
    "loop": frozenset({*NEEDED, *NEEDED_FOR_KAFKA}),
    "hook": frozenset(NEEDED_FOR_KAFKA),
    "agent": frozenset({"mlflow", "cryptography", *NEEDED_FOR_KAFKA}),
}


def examine(workspace: Workspace, part: Part = "loop") -> list[dict[str, Any]]:
    """Findings in the order that part of a deployment meets them: {"check", "ok", "detail", "mend"}."""
    kafka = workspace.config.log.kind == "kafka"
    packages = {**NEEDED, **(NEEDED_FOR_KAFKA if kafka else {})}
    findings = [_package(name, mend) for name, mend in packages.items() if name in PACKAGES[part]]
    checks: dict[str, Callable[[Workspace], str]] = {
        "work folder": _disk,
        **({"broker": _broker, "secrets": _secrets} if kafka else {}),
        "capture log": _log,
        "audit topic": _audit,
        "registry": _registry,
        "target": _target,
    }
    for name, check in checks.items():
        if name not in CHECKS[part]:
            continue
        try:
            findings.append({"check": name, "ok": True, "detail": check(workspace), "mend": ""})
        except DraftloopError as error:
            findings.append({"check": name, "ok": False, "detail": error.message, "mend": error.mend or ""})
        except ImportError as error:
            findings.append({"check": name, "ok": False, "detail": str(error), "mend": "install the package named"})
    return findings


def show(findings: list[dict[str, Any]]) -> str:
    """The findings for a person."""
    lines = []
    for finding in findings:
        lines.append(f"{'ok  ' if finding['ok'] else 'FAIL'} {finding['check']:<14} {finding['detail']}")
        if not finding["ok"]:
            lines.append(f"       mend: {finding['mend']}")
    return "\n".join(lines)


def _package(name: str, mend: str) -> dict[str, Any]:
    try:
        return {"check": name, "ok": True, "detail": importlib.metadata.version(name), "mend": ""}
    except importlib.metadata.PackageNotFoundError:
        return {"check": name, "ok": False, "detail": "not installed", "mend": mend}


def _disk(workspace: Workspace) -> str:
    folder = workspace.root.resolve()
    while not folder.exists():
        folder = folder.parent
    free_gb = shutil.disk_usage(folder).free / 1e9
    if not os.access(folder, os.W_OK):
        raise DraftloopError(f"{folder} is not writable", mend="set work=FOLDER to one that is")
    if free_gb < MIN_FREE_GB:
        raise DraftloopError(f"{free_gb:.1f} GB free at {folder}", mend=f"free at least {MIN_FREE_GB:.0f} GB")
    return f"{free_gb:.0f} GB free"


def _log(workspace: Workspace) -> str:
    return _records(workspace, workspace.raw_topic())


def _audit(workspace: Workspace) -> str:
    return _records(workspace, AUDIT_TOPIC)


def _records(workspace: Workspace, topic: str) -> str:
    log = workspace.open_log()
    try:
        return f"{sum(log.end_offsets(topic).values())} records in {topic}"
    finally:
        log.close()


def _broker(workspace: Workspace) -> str:
    """Address, TLS, login and cluster, each told apart: the client library folds them into one time-out."""
    from draftloop.pipeline.stream.kafka_connect import probe

    kafka = workspace.config.log.kafka
    security = kafka.required()
    cluster = probe(kafka)
    return f"cluster {cluster.cluster_id}, {cluster.num_brokers} broker(s), logged in as {security.principal}"


def _secrets(workspace: Workspace) -> str:
    security = workspace.config.log.kafka.required()
    files = [path for path in (security.password_file, security.key_file, security.key_password_file) if path]
    for path in files:
        if path.exists() and path.stat().st_mode & 0o077:
            raise DraftloopError(f"{path} can be read by others", mend=f"chmod 600 {path}")
    return f"{len(files)} file(s), readable by their owner only"


def _registry(workspace: Workspace) -> str:
    live = workspace.open_registry().champion()
    return f"{without_userinfo(workspace.config.tracking_uri)}, champion {live.version if live else 'none'}"


def _target(workspace: Workspace) -> str:
    fingerprint = workspace.load_target().fingerprint
    name, taps = workspace.config.target.path, fingerprint.tap_layers
    return f"{name}: {fingerprint.digest}, {fingerprint.num_layers} layers, taps {taps}"

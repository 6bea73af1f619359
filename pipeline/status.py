"""What is live, why and since when, read from the registry, the agent's state file and the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftloop.pipeline.data.curate import pending_window
from draftloop.pipeline.errors import ConfigError, DraftloopError, VersionNotFoundError
from draftloop.pipeline.loop import GROUP
from draftloop.pipeline.registry.registry import Registry
from draftloop.pipeline.workspace import RAW_PREFIX, Workspace


def version_before(registry: Registry) -> str:
    """The champion version one before the live one. Raises VersionNotFoundError."""
    live = registry.champion()
    earlier = [
        version.version for version in registry.champions() if live is None or int(version.version) < int(live.version)
    ]
    if not earlier:
        raise VersionNotFoundError("there is no champion version before the live one", mend="name a version")
    return max(earlier, key=int)


def status(workspace: Workspace) -> dict[str, Any]:
    """The state of one work folder. A folder never used yet is an empty state, not an error."""
    root = workspace.root
    found: dict[str, Any] = {
        "work": str(root),
        "champion": None,
        "champions": [],
        "agent": None,
        "job": None,
        "log": None,
    }
    if not root.exists():
        return found
    if not root.is_dir():
        raise ConfigError(f"work = {root}: not a folder", mend="set work=FOLDER to the one to look at")
    if (root / "mlflow.db").is_file() or workspace.config.registry.tracking_uri:
        registry = workspace.open_registry()
        live = registry.champion()
        found["champion"] = live.version if live else None
        found["champions"] = [
            {"version": version.version, "job": version.job_key, "tags": dict(version.tags)}
            for version in registry.champions()
        ]
    state = workspace.staging / "state.json"
    if state.is_file():
        found["agent"] = _read(state)
    current = workspace.jobs / "current.json"
    if current.is_file():
        plan = _read(current)
        key = str(plan.get("key", "unknown"))
        done = sorted(path.stem for path in (workspace.jobs / key).glob("*.json"))
        found["job"] = {"key": key, "outputs": done} | ({"error": plan["error"]} if "error" in plan else {})
    if workspace.config.log.kind == "kafka" or (root / "capture.db").is_file():
        found["log"] = _log(workspace)
    return found


def _read(file: Path) -> dict[str, Any]:
    """A state file's content; a damaged file is a finding, and the rest is still told."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        value = None
    return value if isinstance(value, dict) else {"error": f"{file} cannot be read"}


def _log(workspace: Workspace) -> list[dict[str, Any]]:
    """Every raw topic there is: whoever asks need not know which target the traffic was for."""
    rows: list[dict[str, Any]] = []
    try:
        log = workspace.open_log(make_topics=False)
        try:
            raw = sorted(topic for topic in log.topics() if topic.startswith(RAW_PREFIX))
            if not raw and workspace.config.log.kind == "kafka":
                rows.append({"error": f"{workspace.actor()} sees no topic under {RAW_PREFIX}"})
            for topic in raw:
                window = pending_window(log, topic, GROUP)
                starts, ends = log.start_offsets(topic), log.end_offsets(topic)
                there = sum(end - starts[number] for number, end in ends.items())
                rows.append({"topic": topic, "records": there, "not_yet_used": window.num_entries})
        finally:
            log.close()
    except DraftloopError as error:  # the rest is still told
        rows.append({"error": error.message, "mend": error.mend or ""})
    return rows


def _troubles(agent: dict[str, Any]) -> list[str]:
    """What an operator must know of a replica beyond what it serves."""
    lines = []
    lost, lossless = agent.get("restart_needed"), agent.get("lossless") or {}
    if lost:
        lines.append(f"RESTART NEEDED: {lost.get('reason')}")
    if False in (lossless.get("greedy"), lossless.get("sampling")):
        lines.append(f"not lossless: {lossless.get('reason')}")
    return lines


def describe(found: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [f"work folder   {found['work']}"]
    lines.append(f"champion      {found['champion'] or 'none: the engine drafts with its floor'}")
    for version in found["champions"]:
        tags = ", ".join(f"{key}={value}" for key, value in sorted(version["tags"].items()))
        lines.append(f"  version {version['version']}   job {version['job']}   {tags}")
    if found["agent"]:
        agent = found["agent"]
        serves = f"{agent.get('state')}, serves {agent.get('live') or agent.get('version')}"
        lines.append(f"agent         {agent.get('error') or serves}")
        lines += [f"              {line}" for line in _troubles(agent)]
    if found["job"]:
        job = found["job"]
        has = f"{job['key']} (has {', '.join(job['outputs']) or 'only its plan'})"
        lines.append(f"open job      {job.get('error') or has}")
    for log in found["log"] or ():
        used = f"{log.get('topic')}: {log.get('records')} records, {log.get('not_yet_used')} not yet used"
        lines.append(f"log           {log.get('error') or used}")
        if log.get("mend"):
            lines.append(f"              mend: {log['mend']}")
    return "\n".join(lines)

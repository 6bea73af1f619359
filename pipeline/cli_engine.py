"""The commands beside an engine: `agent`, and the files a server is first started with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftloop.pipeline.cli_answer import Json, answer
from draftloop.pipeline.errors import DraftloopError

if TYPE_CHECKING:
    from draftloop.pipeline.rollout.outcome import Outcome
    from draftloop.pipeline.workspace import Workspace

ConfigFiles = Annotated[list[Path] | None, typer.Option("--config", help="A TOML layer; may be repeated.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, e.g. work=/srv/loop.")]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="A folder or a hub id of a Llama/Qwen-type causal LM.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("agent")(agent)
    app.command("fingerprint")(fingerprint)
    app.command("first-drafter")(first_drafter)
    app.command("engine-files")(engine_files)


def _workspace(files: list[Path] | None, overrides: list[str] | None, target: str | None = None) -> Workspace:
    from draftloop.pipeline.config import load
    from draftloop.pipeline.workspace import Workspace

    extra = [f"target.path={json.dumps(target)}"] if target else []
    return Workspace(load(files or [], [*(overrides or []), *extra]))


def agent(
    overrides: Overrides = None,
    once: Annotated[bool, typer.Option("--once", help="One pass, then end.")] = False,
    config: ConfigFiles = None,
    json_out: Json = False,
) -> None:
    """Follow the champion: swap it into a replica, probe, watch, take back. Until SIGTERM; --json: an object a pass."""
    from draftloop.pipeline.replica import Replica, follow

    workspace = _workspace(config, overrides)
    shown = ""

    def told(found: Outcome | DraftloopError) -> None:
        nonlocal shown
        if isinstance(found, DraftloopError):
            error = {"class": type(found).__name__, "message": found.message, "mend": found.mend}
            line, values = f"{error['class']}: {found}", {"error": error}
        else:
            line = f"{found.state:<14} serves {found.version or 'no version'}: {found.reason}"
            values = found.to_dict()
        if json_out:
            print(json.dumps(values), flush=True)
        elif line != shown:  # a pass that changes nothing says nothing
            print(line, file=sys.stderr if "error" in values else sys.stdout, flush=True)
        shown = line

    follow(Replica(workspace), workspace.config.agent.poll_s, once=once, told=told)


def fingerprint(
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    overrides: Overrides = None,
    config: ConfigFiles = None,
    target: TargetOption = None,
    json_out: Json = False,
) -> None:
    """Write the target's identity, which the plug-in compares drafters with."""
    from draftloop.pipeline.engine_files import write_fingerprint

    workspace = _workspace(config, overrides, target)
    workspace.require_target()
    digest = write_fingerprint(workspace, out)
    answer({"fingerprint": digest, "file": str(out)}, json_out, f"{out}: {digest}")


def first_drafter(
    out: Annotated[Path, typer.Option("--out", help="The folder to make, e.g. work/agent/drafters/boot.")],
    overrides: Overrides = None,
    config: ConfigFiles = None,
    target: TargetOption = None,
    json_out: Json = False,
) -> None:
    """Make the drafter a server boots with on its first day: untrained, in the shapes that later ones keep."""
    from draftloop.pipeline.engine_files import make_first_drafter

    workspace = _workspace(config, overrides, target)
    workspace.require_target()
    digest = make_first_drafter(workspace, out)
    answer({"digest": digest, "folder": str(out)}, json_out, f"{out}: {digest}")


def engine_files(
    out: Annotated[Path, typer.Option("--out", help="The folder to write into.")],
    overrides: Overrides = None,
    config: ConfigFiles = None,
    target: TargetOption = None,
    json_out: Json = False,
) -> None:
    """Write serving.toml, admin token, fingerprint, vLLM's flags and the agent's settings for this work folder."""
    from draftloop.pipeline.engine_files import write_engine_files

    workspace = _workspace(config, overrides, target)
    workspace.require_target()
    files = write_engine_files(workspace, out)
    answer(
        files.to_dict(),
        json_out,
        f"start the server with:\n  {files.command}\nand its agent with:\n  draftloop agent --config {files.agent}\n"
        f"Nobody is captured before [identity] in {files.settings} says whose a request is: default_tenant for a "
        "server of one tenant, api_keys, or a gateway's secret.",
    )

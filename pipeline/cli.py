"""The command line: parse, import late, call. One JSON object on stdout with --json; bars and lines go to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Never

import typer

from draftloop.pipeline import cli_engine
from draftloop.pipeline.cli_answer import Json, answer
from draftloop.pipeline.cli_bench import bench_app
from draftloop.pipeline.cli_stream import access_app, broker_app
from draftloop.pipeline.errors import ConfigError, DraftloopError, GateRefusedError, StorageError

if TYPE_CHECKING:
    from draftloop.pipeline.config import Config
    from draftloop.pipeline.workspace import Workspace

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps the drafter of a live LLM engine in step with the traffic it serves.",
)

app.add_typer(broker_app, name="broker")
app.add_typer(access_app, name="access")
app.add_typer(bench_app, name="bench")

ConfigFiles = Annotated[list[Path] | None, typer.Option("--config", help="A TOML layer; may be repeated.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, e.g. train.epochs=3.")]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="A folder or a hub id of a Llama/Qwen-type causal LM.")
]


def main() -> None:
    """Entry point: errors of ours become a message with the mend and DESIGN's exit codes."""
    # Before torch is loaded. Threads that spin at OpenMP barriers are 3 to 10 times slower than one thread as soon as
    # anything else runs on the machine (measured); a user's own setting stands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # kafka-python prints a traceback for each connection it loses; what matters of it comes out as an error of ours.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except DraftloopError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        _fail(ConfigError(f"{error}", mend="install the extras: pip install 'draftloop[train,mlflow,kafka]'"))
    except OSError as error:
        _fail(StorageError(f"{error}", mend="free disk space or fix the rights there, then run the same command again"))
    except typer.Abort:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001  outermost guard: with --json a caller waits for one object
        usage = getattr(error, "format_message", None)  # click's errors, which typer carries under a private name
        if usage is None:
            traceback.print_exc()
            _tell(type(error).__name__, "not foreseen: the traceback is on stderr", "report it")
            sys.exit(1)
        show = getattr(error, "show", None)
        if show is not None:
            show()
        _tell(type(error).__name__, usage(), "see `draftloop COMMAND --help`")
        sys.exit(getattr(error, "exit_code", 2))


def _fail(error: DraftloopError) -> Never:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    _tell(type(error).__name__, error.message, error.mend)
    sys.exit(error.exit_code)


def _tell(name: str, message: str, mend: str | None) -> None:
    """With --json an error is an object on stdout too."""
    if "--json" in sys.argv:
        print(json.dumps({"error": {"class": name, "message": message, "mend": mend}}))


def _workspace(files: list[Path] | None, overrides: list[str] | None, *, target: str | None = None) -> Workspace:
    from draftloop.pipeline.workspace import Workspace

    return Workspace(_config(files, overrides, target=target))


def _config(files: list[Path] | None, overrides: list[str] | None, *, target: str | None = None) -> Config:
    from draftloop.pipeline.config import load

    extra = [f"target.path={json.dumps(target)}"] if target else []
    return load(files or [], [*(overrides or []), *extra])


@app.command()
def demo(
    overrides: Overrides = None, config: ConfigFiles = None, target: TargetOption = None, json_out: Json = False
) -> None:
    """The whole loop on one machine with a real small model; no service needed."""
    from draftloop.pipeline.demo import demo_config, run_demo
    from draftloop.pipeline.ui import Screen
    from draftloop.pipeline.workspace import Workspace

    result = run_demo(Workspace(demo_config(config or [], overrides or [], target)), Screen())
    if json_out:
        print(json.dumps(result))
    if not result["rolled_back"]:  # the story did not end as it should: told above, and by the exit code
        raise typer.Exit(1)


@app.command("run-once")
def run_once(
    overrides: Overrides = None, config: ConfigFiles = None, target: TargetOption = None, json_out: Json = False
) -> None:
    """curate -> train -> replay -> gate -> register (-> promote where policy allows), under a lease."""
    _run_until(None, overrides, config, target, json_out)


def _run_until(
    last: str | None, overrides: list[str] | None, config: list[Path] | None, target: str | None, json_out: bool
) -> None:
    from draftloop.pipeline.loop import run_once as run
    from draftloop.pipeline.stages import LoopStages
    from draftloop.pipeline.ui import Screen

    workspace = _workspace(config, overrides, target=target)
    workspace.require_target()
    result = run(workspace, LoopStages(workspace, workspace.open_registry()), Screen(), last=last)
    answer(result.to_dict(), json_out, f"{result.outcome}: {result.reason}")
    if result.outcome == "refused":
        raise typer.Exit(GateRefusedError.exit_code)


def _stage_command(name: str, purpose: str) -> None:
    def command(
        overrides: Overrides = None, config: ConfigFiles = None, target: TargetOption = None, json_out: Json = False
    ) -> None:
        _run_until(name, overrides, config, target, json_out)

    command.__doc__ = f"{purpose} The current job up to this stage; stages already done are skipped."
    app.command(name)(command)


_stage_command("curate", "Offset window -> snapshot, with the ledger.")
_stage_command("train", "Snapshot (+ champion) -> challenger.")
_stage_command("gate", "Replay reports -> signed verdict.")
_stage_command("register", "Passed challenger -> MLflow candidate.")


@app.command()
def replay(
    overrides: Overrides = None,
    snapshot: Annotated[Path | None, typer.Option(help="A snapshot folder; without it, the current job's.")] = None,
    drafter: Annotated[list[Path] | None, typer.Option(help="A drafter folder; may be repeated.")] = None,
    config: ConfigFiles = None,
    target: TargetOption = None,
    json_out: Json = False,
) -> None:
    """Drafters x held-out requests -> tau, per position and slice, compared with intervals."""
    if snapshot is None:
        _run_until("replay", overrides, config, target, json_out)
        return
    from draftloop.pipeline.judge.compare import compare, table
    from draftloop.pipeline.ui import Screen

    result = compare(_workspace(config, overrides, target=target), snapshot, drafter or [], Screen())
    answer(result, json_out, table(result))


@app.command()
def promote(
    version: Annotated[str, typer.Argument(help="A candidate version.")],
    overrides: Overrides = None,
    by: Annotated[str, typer.Option(help="Who decides.")] = "operator",
    reason: Annotated[str, typer.Option(help="Why; kept with the version.")] = "",
    config: ConfigFiles = None,
    json_out: Json = False,
) -> None:
    """Copy a candidate into the champions and move the alias; agents follow it."""
    champion = _workspace(config, overrides).open_registry().promote(version, by=by, reason=reason)
    answer(
        {"champion": champion.version, "candidate": version}, json_out, f"champion is now version {champion.version}"
    )


@app.command()
def rollback(
    version: Annotated[str | None, typer.Argument(help="A champion version; without it, the one before.")] = None,
    overrides: Overrides = None,
    by: Annotated[str, typer.Option(help="Who decides.")] = "operator",
    reason: Annotated[str, typer.Option(help="Why; kept with the version.")] = "",
    config: ConfigFiles = None,
    json_out: Json = False,
) -> None:
    """Move the champion alias back to an earlier version."""
    from draftloop.pipeline.status import version_before

    if version is not None and "=" in version:
        overrides = [version, *(overrides or [])]
        version = None
    registry = _workspace(config, overrides).open_registry()
    champion = registry.set_champion(version or version_before(registry), by=by, reason=reason)
    answer({"champion": champion.version}, json_out, f"champion is again version {champion.version}")


@app.command()
def ingest(
    files: Annotated[
        list[Path], typer.Argument(help="JSONL files: OpenAI-style chat, ShareGPT, or engine logs with token ids.")
    ],
    tenant: Annotated[str, typer.Option(help="Whose requests these are.")],
    consent: Annotated[
        str | None, typer.Option(help="Basis of the permission to train on them; without it nothing is kept.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    config: ConfigFiles = None,
    target: TargetOption = None,
    json_out: Json = False,
) -> None:
    """Text or token logs from elsewhere -> capture log."""
    from draftloop.pipeline.data.ingest_command import ingest_files
    from draftloop.pipeline.ui import Screen

    workspace = _workspace(config, settings, target=target)
    counts = ingest_files(workspace, files, tenant=tenant, consent=consent, screen=Screen())
    answer(counts, json_out, f"read {counts['read']}, kept {counts['kept']}, rejected {counts['rejected'] or 'none'}")


@app.command()
def status(overrides: Overrides = None, config: ConfigFiles = None, json_out: Json = False) -> None:
    """What is live, why, since when, and what waits."""
    from draftloop.pipeline.status import describe
    from draftloop.pipeline.status import status as read

    found = read(_workspace(config, overrides))
    answer(found, json_out, describe(found))


@app.command()
def audit(
    overrides: Overrides = None,
    act: Annotated[str | None, typer.Option(help="Only acts that begin so, e.g. window or champion.promote.")] = None,
    since: Annotated[str | None, typer.Option(help="Only from then on, e.g. 2026-11-30T12:00.")] = None,
    config: ConfigFiles = None,
    json_out: Json = False,
) -> None:
    """Who did what and when: the audit topic, oldest first. Kafka: as a user that may read it, the auditor's."""
    from draftloop.pipeline.audit_report import audit_lines, describe

    found = audit_lines(_workspace(config, overrides), act=act, since=since)
    answer({"records": found}, json_out, describe(found))


@app.command()
def doctor(
    overrides: Overrides = None,
    part: Annotated[
        str, typer.Option("--as", help="What runs here: loop (run-once), hook (an engine's plug-in) or agent.")
    ] = "loop",
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask a running vLLM instead: is its speculation lossless?")
    ] = None,
    engine_token_file: Annotated[Path | None, typer.Option(help="The token of its admin route.")] = None,
    config: ConfigFiles = None,
    target: TargetOption = None,
    json_out: Json = False,
) -> None:
    """Checks packages, disk, broker, log, registry and target, or a running engine; says how to mend each."""
    from draftloop.pipeline.doctor import CHECKS, examine, show

    known = next((name for name in CHECKS if name == part), None)
    if known is None:
        raise ConfigError(f"--as {part}: no such part", mend=f"one of {', '.join(CHECKS)}")
    workspace = _workspace(config, overrides, target=target)
    if engine is not None:
        from draftloop.pipeline.engine_doctor import examine_engine
        from draftloop.pipeline.replica import token_file

        findings = examine_engine(workspace, engine, engine_token_file or token_file(workspace))
    else:
        findings = examine(workspace, known)
    answer({"checks": findings}, json_out, show(findings))
    if not all(finding["ok"] for finding in findings):
        raise typer.Exit(1)


@app.command("config")
def show_config(
    overrides: Overrides = None, config: ConfigFiles = None, target: TargetOption = None, json_out: Json = False
) -> None:
    """Every setting with its resolved value; what may be a secret is not shown."""
    from draftloop.pipeline.config import shown

    resolved = shown(_config(config, overrides, target=target))
    answer(resolved, json_out, json.dumps(resolved, indent=1))


cli_engine.register(app)


if __name__ == "__main__":
    main()

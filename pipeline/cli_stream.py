"""The commands around Kafka: `broker` (one on this machine), `access` (who may do what)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from draftloop.pipeline.cli_answer import Json, answer
from draftloop.pipeline.errors import AccessSurpriseError, ConfigError, DraftloopError, LocalBrokerError

broker_app = typer.Typer(no_args_is_help=True, help="A real Apache Kafka on this machine, for development and tests.")
access_app = typer.Typer(no_args_is_help=True, help="Topics, users, ACLs and quotas of a cluster, from one TOML.")

Home = Annotated[Path, typer.Option("--home", help="The broker's folder.")]
Libs = Annotated[Path | None, typer.Option("--libs", help="Folder of Kafka's jars.")]
DEFAULT_HOME = Path("broker")


@broker_app.command("up")
def broker_up(
    home: Home = DEFAULT_HOME,
    libs: Libs = None,
    wait_s: Annotated[float, typer.Option("--wait", min=1, help="Seconds to wait until it answers.")] = 60.0,
    json_out: Json = False,
) -> None:
    """Start it (or find it running); returns when it answers. Data, passwords and certificates stay between starts."""
    from draftloop.pipeline.stream.broker import LocalBroker
    from draftloop.pipeline.stream.broker_audit import note
    from draftloop.pipeline.ui import Screen

    broker = LocalBroker(home)
    ran = broker.status()["running"]
    broker.up(libs=libs, wait_s=wait_s, on_wait=Screen().say)
    if not ran:
        note(home, "broker.start", "done")
    found = broker.status()
    answer(found, json_out, _describe(found))


@broker_app.command("down")
def broker_down(
    home: Home = DEFAULT_HOME,
    wait_s: Annotated[float, typer.Option("--wait", min=1, help="Seconds before it is killed.")] = 30.0,
    json_out: Json = False,
) -> None:
    """Stop the broker of this folder and no other; its data stay."""
    from draftloop.pipeline.stream.broker import LocalBroker
    from draftloop.pipeline.stream.broker_audit import note

    broker = LocalBroker(home)
    try:
        if broker.status()["running"]:
            note(home, "broker.stop", "begun")
    except DraftloopError as error:  # whatever is wrong with it or its files, it must still be stopped
        typer.echo(f"the stop is not on the audit topic: {error.message}", err=True)
    stopped = broker.down(wait_s=wait_s)
    answer({"stopped": stopped}, json_out, "stopped" if stopped else "it was not running")


@broker_app.command("status")
def broker_status(home: Home = DEFAULT_HOME, json_out: Json = False) -> None:
    """Whether it runs, where it listens, how much memory it takes. Exit code 1 where it does not run."""
    from draftloop.pipeline.stream.broker import LocalBroker

    found = LocalBroker(home).status()
    answer(found, json_out, _describe(found))
    if not found["running"]:
        raise typer.Exit(LocalBrokerError.exit_code)


@broker_app.command("logs")
def broker_logs(
    home: Home = DEFAULT_HOME,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many, from the end.")] = 50,
    json_out: Json = False,
) -> None:
    """The end of the broker's own log."""
    from draftloop.pipeline.stream.broker import LocalBroker

    found = LocalBroker(home).log_tail(lines)
    answer({"lines": found}, json_out, "\n".join(found))


@broker_app.command("fetch")
def broker_fetch(
    libs: Annotated[Path, typer.Option("--libs", help="Folder for the jars.")] = Path("kafka-libs"),
    json_out: Json = False,
) -> None:
    """Fetch Kafka's jars with Maven, where Maven and its repository are there."""
    from draftloop.pipeline.stream.broker import fetch

    found = fetch(libs)
    answer({"libs": str(found)}, json_out, f"jars in {found}: draftloop broker up --libs {found}")


@broker_app.command("certificates")
def broker_certificates(home: Home = DEFAULT_HOME, json_out: Json = False) -> None:
    """Make the certificates and settings that `configs/deploy/compose.yaml` mounts; starts nothing."""
    from draftloop.pipeline.stream.broker import LocalBroker

    LocalBroker(home).certificates()
    answer({"home": str(home)}, json_out, f"certificates in {home / 'tls'}")


@broker_app.command("admit")
def broker_admit(
    home: Home = DEFAULT_HOME,
    bootstrap: Annotated[str, typer.Option(help="Its SASL_SSL listener.")] = "127.0.0.1:9092",
    mtls: Annotated[str, typer.Option(help="Its listener for certificates.")] = "127.0.0.1:9094",
    json_out: Json = False,
) -> None:
    """Give the administrator a password and a client file on a Kafka that trusts this folder's CA: a container."""
    from draftloop.pipeline.stream.broker import LocalBroker

    LocalBroker(home).admit(bootstrap=bootstrap, mtls_bootstrap=mtls)
    answer({"home": str(home)}, json_out, f"{home / 'clients' / 'admin.toml'} reaches {bootstrap}")


def _describe(found: dict[str, Any]) -> str:
    if not found["running"]:
        return f"no broker runs in {found.get('home')}: draftloop broker up"
    width = max(map(len, found))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in found.items())


AccessHome = Annotated[Path, typer.Option("--home", help="Its clients/admin.toml says how to reach the cluster.")]
AccessFile = Annotated[
    Path | None,
    typer.Option("--access", help="The access TOML; without it, the one applied to HOME last, or draftloop's own."),
]


@access_app.command("plan")
def access_plan(
    home: AccessHome = DEFAULT_HOME,
    access: AccessFile = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 unless all is as the file says and nothing more: for timers.")
    ] = False,
    json_out: Json = False,
) -> None:
    """What differs between the access file and the cluster, both ways. Changes nothing.

    Exit code 2 where the file asks for what cannot be done (IMPOSSIBLE).
    """
    from draftloop.pipeline.stream.access_site import open_site

    with open_site(home, access) as site:
        found = site.plan()
    answer(found.to_dict(), json_out, found.text())
    if found.impossible:
        raise typer.Exit(ConfigError.exit_code)
    if check and not found.in_sync:
        raise typer.Exit(1)


@access_app.command("apply")
def access_apply(
    home: AccessHome = DEFAULT_HOME,
    access: AccessFile = None,
    rotate: Annotated[list[str] | None, typer.Option(help="A user that gets a new password; may be repeated.")] = None,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Also remove ACLs, and users under the prefix, that the file does not have."),
    ] = False,
    json_out: Json = False,
) -> None:
    """Bring the cluster in line with the access file; a second time it does nothing.

    Exit code 2 where the file asks for what cannot be done (nothing is changed then), or where a user's password is
    not here.
    """
    from draftloop.pipeline.stream.access_site import open_site
    from draftloop.pipeline.ui import Screen

    with open_site(home, access) as site:
        done = site.apply(rotate=rotate or (), prune=prune, on_act=Screen().say)
    answer(done.to_dict(), json_out, done.text())
    try:
        done.check()
    except ConfigError as error:  # what was done is the answer either way
        typer.echo(f"ConfigError: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


@access_app.command("verify")
def access_verify(home: AccessHome = DEFAULT_HOME, access: AccessFile = None, json_out: Json = False) -> None:
    """Log in as each principal and try every act, allowed and forbidden; look for rights of others. Exit code 1: any.

    Also a failure: ACLs, users under the prefix and settings that the access file does not have.
    """
    from draftloop.pipeline.stream.access_site import open_site
    from draftloop.pipeline.stream.audit import audited
    from draftloop.pipeline.ui import Screen

    with open_site(home, access) as site, Screen().bar("access verify", len(site.spec.principals)) as advance:
        begun: list[str] = []

        def show(note: str) -> None:
            advance(len(begun), note)
            begun.append(note)

        cluster_id = site.cluster.cluster_id()
        try:
            with audited(site.audit, "access.verify", by=site.cluster.principal, subject=cluster_id):
                matrix = site.verify(show)
                advance(len(begun), f"{len(matrix.cells)} acts tried")
                matrix.check()
        except AccessSurpriseError as error:  # the cells are the answer either way
            answer(matrix.to_dict(), json_out, matrix.text())
            told = error if json_out else f"not as the access file says, see above\n  mend: {error.mend}"
            typer.echo(f"AccessSurpriseError: {told}", err=True)
            raise typer.Exit(error.exit_code) from None
    answer(matrix.to_dict(), json_out, matrix.text())


@access_app.command("example")
def access_example(json_out: Json = False) -> None:
    """Print draftloop's own access file, to start from: `draftloop access example > access.toml`."""
    from draftloop.pipeline.stream.access_spec import DEFAULT_FILE

    toml = DEFAULT_FILE.read_text(encoding="utf-8")
    answer({"toml": toml}, json_out, toml.rstrip("\n"))

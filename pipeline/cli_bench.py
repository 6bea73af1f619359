"""The command `bench`: what things cost, each beside a peer, a limit, or the same run without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftloop.pipeline.cli_answer import Json, answer
from draftloop.pipeline.cli_stream import Libs
from draftloop.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from draftloop.pipeline.bench_site import Site
    from draftloop.pipeline.ui import Screen

bench_app = typer.Typer(no_args_is_help=True, help="What things cost, beside a peer or a limit in the same run.")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings.")]
ConfigFiles = Annotated[list[Path] | None, typer.Option("--config", help="A TOML file; may be repeated.")]
TargetOption = Annotated[str | None, typer.Option("--target", help="A model folder or hub id.")]
Drafter = Annotated[Path | None, typer.Option(help="A drafter folder of this target; without it, an untrained one.")]
Streams = Annotated[int, typer.Option(min=1, help="Requests at once.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=8, help="Of an output.")]


@bench_app.command("log")
def bench_log(
    home: Annotated[
        Path | None, typer.Option("--home", help="A running broker's folder; without it, one is started for the run.")
    ] = None,
    libs: Libs = None,
    records: Annotated[int, typer.Option(min=1000, help="Records a client and round.")] = 50_000,
    record_bytes: Annotated[int, typer.Option(min=100)] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    json_out: Json = False,
) -> None:
    """Our Kafka log beside confluent-kafka: records/s and CPU per record, both ways, same broker, same run."""
    import importlib.util

    from draftloop.pipeline.stream.kafka_bench import CLIENTS, bench_log, table
    from draftloop.pipeline.ui import Screen

    if importlib.util.find_spec("confluent_kafka") is None:
        raise ConfigError("confluent-kafka, the peer, is not installed", mend="pip install 'draftloop[kafka,bench]'")
    with _broker_for(home, libs) as admin, Screen().bar("bench log", rounds * len(CLIENTS)) as advance:
        result = bench_log(admin, records=records, record_bytes=record_bytes, rounds=rounds, on_progress=advance)
    answer(result, json_out, table(result))


@bench_app.command("curate")
def bench_curate(
    folder: Annotated[Path, typer.Option("--folder", help="Where its files may lie for that time.")] = Path("."),
    sizes: Annotated[list[int] | None, typer.Option("--size", min=1000, help="Records; may be repeated.")] = None,
    log: Annotated[str, typer.Option("--log", help="synthetic, sqlite, or a Kafka client's TOML.")] = "synthetic",
    rounds: Annotated[int, typer.Option(min=1, help="The best of so many counts: a busy core costs 20 %.")] = 1,
    json_out: Json = False,
) -> None:
    """Curation by size: seconds, peak memory and throughput, beside reading and decoding alone."""
    from draftloop.pipeline.data.bench_curate import bench_curate, table
    from draftloop.pipeline.ui import Screen

    result = bench_curate(folder, sizes=sizes or (100_000, 1_000_000), log=log, rounds=rounds, say=Screen().say)
    answer(result, json_out, table(result))


@bench_app.command("capture")
def bench_capture(
    overrides: Overrides = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="In a real vLLM server: tokens/s with capture on over off, interleaved.")
    ] = False,
    pairs: Annotated[int, typer.Option(min=2, help="--engine: of runs on and off.")] = 10,
    streams: Streams = 8,
    max_tokens: MaxTokens = 48,
    drafter: Drafter = None,
    home: Annotated[
        Path | None, typer.Option("--home", help="A running broker's folder; without it, one is started for the run.")
    ] = None,
    libs: Libs = None,
    rate: Annotated[float, typer.Option(min=1, help="Finished requests a second.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=1)] = 30.0,
    config: ConfigFiles = None,
    target: TargetOption = None,
    json_out: Json = False,
) -> None:
    """What the serving thread sees of capture into a real Kafka, and what became of every record.

    With --engine: what a real vLLM server loses to it.
    """
    if engine:
        from draftloop.pipeline import bench_engine, bench_tables
        from draftloop.pipeline.ui import Screen

        screen = Screen()
        with _engine_site(overrides, config, target, drafter, None, streams, max_tokens, screen) as site:
            found = bench_engine.bench_capture(site, pairs=pairs, streams=streams, screen=screen)
        answer(found, json_out, bench_tables.capture(found))
        return
    import msgspec

    from draftloop.pipeline.stream.load import LoadPlan, measure, table

    with _broker_for(home, libs) as admin:
        result = measure(admin, LoadPlan(rate=rate, seconds=seconds))
    answer(msgspec.to_builtins(result), json_out, table(result))


@bench_app.command("swap")
def bench_swap(
    overrides: Overrides = None,
    drafter: Drafter = None,
    other: Annotated[
        Path | None, typer.Option(help="The drafter it swaps with; without it, the first with a little noise.")
    ] = None,
    swaps: Annotated[int, typer.Option(min=2)] = 20,
    streams: Streams = 8,
    max_tokens: MaxTokens = 48,
    config: ConfigFiles = None,
    target: TargetOption = None,
    json_out: Json = False,
) -> None:
    """Swaps a -> b -> a in a real vLLM server under load: pauses, gaps between tokens, outputs, memory, target."""
    from draftloop.pipeline import bench_engine, bench_tables
    from draftloop.pipeline.ui import Screen

    screen = Screen()
    with _engine_site(overrides, config, target, drafter, other, streams, max_tokens, screen) as site:
        found = bench_engine.bench_swap(site, swaps=swaps, streams=streams, screen=screen)
    answer(found, json_out, bench_tables.swap(found))


@bench_app.command("speed")
def bench_speed(
    overrides: Overrides = None,
    drafter: Drafter = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Streams at once; may be repeated.")] = None,
    pairs: Annotated[int, typer.Option(min=2, help="Interleaved runs with and without.")] = 4,
    requests: Annotated[int, typer.Option(min=1, max=24, help="Of a run.")] = 8,
    max_tokens: MaxTokens = 64,
    config: ConfigFiles = None,
    target: TargetOption = None,
    json_out: Json = False,
) -> None:
    """Output tokens/s of a real vLLM server with a drafter over one without, interleaved in this run."""
    from draftloop.pipeline import bench_engine, bench_tables
    from draftloop.pipeline.ui import Screen

    batches, screen = tuple(batch or (1, 8)), Screen()
    with _engine_site(overrides, config, target, drafter, None, max(batches), max_tokens, screen) as site:
        found = bench_engine.bench_speed(site, batches=batches, pairs=pairs, num_requests=requests, screen=screen)
    answer(found, json_out, bench_tables.speed(found))


def _engine_site(
    overrides: list[str] | None,
    files: list[Path] | None,
    target: str | None,
    drafter: Path | None,
    other: Path | None,
    streams: int,
    max_tokens: int,
    screen: Screen,
) -> AbstractContextManager[Site]:
    from draftloop.pipeline.bench_site import open_site
    from draftloop.pipeline.demo import demo_config
    from draftloop.pipeline.workspace import Workspace

    workspace = Workspace(demo_config(files or [], overrides or [], target))
    workspace.require_target()
    folder = workspace.root / "bench-engine"
    return open_site(workspace, folder, drafter, other, streams=streams, max_tokens=max_tokens, screen=screen)


@contextmanager
def _broker_for(home: Path | None, libs: Path | None) -> Iterator[Path]:
    """The administrator's client file of a running broker; one in a temporary folder where none is named."""
    import tempfile

    from draftloop.pipeline.stream.broker import LocalBroker
    from draftloop.pipeline.ui import Screen

    if home is not None:
        yield home / "clients" / "admin.toml"
        return
    with tempfile.TemporaryDirectory(prefix="draftloop-bench-") as folder:
        broker = LocalBroker(Path(folder) / "broker")
        try:
            broker.up(libs=libs, on_wait=Screen().say)
            yield broker.home / "clients" / "admin.toml"
        finally:
            broker.down()

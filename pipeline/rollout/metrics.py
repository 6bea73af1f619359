"""What the agent shows to Prometheus, as a file for a textfile collector: no port to open, no thread to keep alive."""

from __future__ import annotations

from pathlib import Path

from draftloop.pipeline.errors import ConfigError, StorageError
from draftloop.pipeline.records import SpecCounters
from draftloop.pipeline.rollout.journal import Memory


def write(path: Path, memory: Memory, counters: SpecCounters) -> None:
    """Replace the metrics file in one step; tau counts from the start of the watch, or of the recent readings.

    Raises StorageError, ConfigError without prometheus_client.
    """
    try:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Info, write_to_textfile
    except ImportError as error:
        raise ConfigError(
            f"agent.metrics_file is set, but {error}", mend="pip install 'draftloop[mlflow]', or unset it"
        ) from error
    start = memory.baseline if memory.state == "WATCHING" or not memory.readings else memory.readings[0]
    seen = counters.since(start)
    if seen.num_steps < 0:  # the engine restarted
        seen = counters
    registry = CollectorRegistry()
    version = Info(
        "draftloop_drafter_version", "The drafter the engine serves, and the agent's state.", registry=registry
    )
    version.info({"version": memory.live or "none", "digest": memory.serving.digest[:12], "state": memory.state})
    swaps = Counter("draftloop_swaps", "Swaps by result.", ["result"], registry=registry)
    for result, times in memory.totals.items():
        swaps.labels(result).inc(times)
    tau = Gauge("draftloop_tau_since_swap", "Tokens per target step with the live drafter.", registry=registry)
    tau.set(seen.tau)
    steps = Gauge("draftloop_steps_since_swap", "Target steps behind that number.", registry=registry)
    steps.set(seen.num_steps)
    if memory.swap_ms is not None:
        Gauge("draftloop_swap_milliseconds", "Pause to resume of the last swap.", registry=registry).set(memory.swap_ms)
    lost = Gauge("draftloop_restart_needed", "1: only a restart of this replica helps.", registry=registry)
    lost.set(memory.restart_needed is not None)
    for name, holds in (("greedy", memory.lossless.greedy), ("sampling", memory.lossless.sampling)):
        if holds is not None:
            what = f"1: the last probe found {name} outputs to be the target's own; 0: they are not."
            Gauge(f"draftloop_{name}_lossless", what, registry=registry).set(holds)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(path), registry)
    except OSError as error:
        raise StorageError(f"writing {path} failed: {error}", mend="free disk space; the old file stands") from error

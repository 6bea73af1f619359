"""What the plug-in adds to the metrics that vLLM exports: read from the runtime when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.runtime import Runtime


class RuntimeCollector:
    """A collector of prometheus_client."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def describe(self) -> list[Any]:
        """Nothing in advance: the registry need not collect to know the names."""
        return []

    def collect(self) -> Iterator[Any]:
        """The families of this moment."""
        runtime = self._runtime
        served = runtime.served
        drafter = GaugeMetricFamily(
            "draftloop_drafter_version_info", "The drafter that serves", labels=("version", "digest")
        )
        drafter.add_metric((served.version or "", served.digest or ""), 1)
        yield drafter
        swaps = CounterMetricFamily("draftloop_swaps", "Swaps asked for, by result", labels=("result",))
        for result, count in sorted(runtime.swaps.items()):
            swaps.add_metric((result,), count)
        yield swaps
        yield from self._captures()
        yield GaugeMetricFamily(
            "draftloop_restart_needed",
            "1: this process must be replaced",
            value=0 if runtime.restart_needed is None else 1,
        )
        yield CounterMetricFamily(
            "draftloop_steps", "Target steps after prefill, one a sequence", value=runtime.counters.num_steps
        )
        yield CounterMetricFamily(
            "draftloop_emitted_tokens", "Tokens users got from those steps", value=runtime.counters.num_emitted
        )

    def _captures(self) -> Iterator[Any]:
        hook = self._runtime.hook
        if hook is None:
            return
        counters = hook.counters()
        requests = CounterMetricFamily(
            "draftloop_capture_requests", "Finished choices, by what became of them", labels=("outcome",)
        )
        for name, count in counters.items():
            if name == "delivered" or name.startswith("dropped."):
                requests.add_metric((name.removeprefix("dropped."),), count)
        yield requests
        yield GaugeMetricFamily(
            "draftloop_capture_queue_bytes", "Memory of what is not delivered yet", value=counters["queue_bytes"]
        )


def export(runtime: Runtime) -> None:
    """Put the runtime's collector into the registry behind /metrics.

    Several API servers share vLLM's own numbers through files; ours are then those of the server that answers.
    """
    collector = RuntimeCollector(runtime)
    REGISTRY.register(collector)
    module = versions.metrics_route()
    module.get_prometheus_registry = _joining(module.get_prometheus_registry, collector)


def _joining(plain: Callable[[], Any], collector: RuntimeCollector) -> Callable[[], Any]:
    @wraps(plain)
    def get_prometheus_registry() -> Any:
        registry = plain()
        if registry is not REGISTRY:
            registry.register(collector)
        return registry

    return get_prometheus_registry

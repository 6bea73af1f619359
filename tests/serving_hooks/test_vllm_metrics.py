"""What the plug-in adds to vLLM's metrics, in one process and in several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest

from draftloop.pipeline.records import SpecCounters
from draftloop.pipeline.stream.log import MemoryLog
from draftloop.pipeline.stream.policy import ConsentPolicy
from draftloop.serving_hooks.capture import CaptureHook
from draftloop.serving_hooks.vllm import metrics, versions
from draftloop.serving_hooks.vllm.runtime import Runtime


def text(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_every_metric_is_read_from_the_runtime_when_it_is_asked_for() -> None:
    runtime = Runtime()
    registry = CollectorRegistry()
    registry.register(metrics.RuntimeCollector(runtime))
    assert text(registry) == [
        'draftloop_drafter_version_info{digest="",version=""} 1.0',
        "draftloop_restart_needed 0.0",
        "draftloop_steps_total 0.0",
        "draftloop_emitted_tokens_total 0.0",
    ]
    runtime.hook = CaptureHook(MemoryLog, topic="t", policy=ConsentPolicy(version="1"), target="t")
    runtime.hook.refuse("lora")
    runtime.serve("3", "d3", "t3")
    runtime.count_swap("done")
    runtime.restart_needed = "lost"
    runtime.counters = SpecCounters(num_steps=5, num_emitted=9)
    assert text(registry) == [
        'draftloop_drafter_version_info{digest="d3",version="3"} 1.0',
        'draftloop_swaps_total{result="done"} 1.0',
        'draftloop_capture_requests_total{outcome="delivered"} 0.0',
        'draftloop_capture_requests_total{outcome="lora"} 1.0',
        "draftloop_capture_queue_bytes 0.0",
        "draftloop_restart_needed 1.0",
        "draftloop_steps_total 5.0",
        "draftloop_emitted_tokens_total 9.0",
    ]


def test_a_registry_of_several_processes_gets_the_collector_once_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = CollectorRegistry()
    own = CollectorRegistry()
    route = SimpleNamespace(get_prometheus_registry=lambda: shared)
    monkeypatch.setattr(versions, "metrics_route", lambda: route)
    monkeypatch.setattr(metrics, "REGISTRY", own)
    metrics.export(Runtime())
    assert route.get_prometheus_registry() is shared
    assert text(shared) == text(own)
    assert len(text(own)) == 4

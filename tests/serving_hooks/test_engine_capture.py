"""What the embedded engine hands to the capture hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from draftloop.pipeline.records import Sampling, decode, unpack_floats, unpack_ids  # noqa: E402
from draftloop.pipeline.stream.log import MemoryLog  # noqa: E402
from draftloop.pipeline.stream.policy import ConsentPolicy, TenantConsent  # noqa: E402
from draftloop.serving_hooks.capture import CaptureHook  # noqa: E402
from draftloop.serving_hooks.embedded.engine import EmbeddedEngine, EngineConfig, Request  # noqa: E402

TOPIC = "raw"
Prompts = list[tuple[int, ...]]


def hook_on(log: MemoryLog, digest: str) -> CaptureHook:
    policy = ConsentPolicy(version="1", tenants={"acme": TenantConsent()})
    return CaptureHook(lambda: log, topic=TOPIC, policy=policy, target=digest)


def stored(log: MemoryLog) -> list[Any]:
    return [decode(entry.value) for entry in log.read(TOPIC, 0, 0, 10_000)]


def test_every_allowed_completion_becomes_one_record_and_probes_none(
    tiny_target: Any, prompts: Prompts, publish: Any, trained_drafter: Any
) -> None:
    log = MemoryLog()
    log.create_topic(TOPIC, num_partitions=1)
    hook = hook_on(log, tiny_target.fingerprint.digest)
    folder: Path = publish("trained", trained_drafter)
    requests = [
        Request(
            f"r{index}",
            prompt,
            Sampling(max_tokens=20, temperature=0.5),
            conversation_id=f"c{index}",
            tenant="acme" if index % 2 else "nobody",
            subject=f"s{index}",
            slices={"language": "en"},
        )
        for index, prompt in enumerate(prompts)
    ]
    config = EngineConfig(max_sequence=160, max_batch=3, capture_logprobs=True)
    order: list[str] = []
    with EmbeddedEngine(tiny_target, config, hook) as engine:
        engine.pause()
        engine.load_drafter(folder, "7")
        engine.resume()
        done = engine.generate(requests, on_done=lambda each: order.append(each.request_id))
        engine.probe(prompts[:2], 5)
    assert hook.close(5)
    records = stored(log)
    assert [record.record_id for record in records] == [name for name in order if int(name[1:]) % 2]
    of = {each.request_id: each for each in done}
    for record in records:
        each = of[record.record_id]
        assert tuple(unpack_ids(record.prompt_ids)) == each.prompt_ids
        assert tuple(unpack_ids(record.output_ids)) == each.output_ids
        assert (record.accepted, record.drafted) == (each.accepted, each.drafted)
        assert unpack_floats(record.logprobs) == pytest.approx(each.logprobs)
        assert (record.drafter_version, record.target) == ("7", tiny_target.fingerprint.digest)
        assert (record.tenant, record.subject) == ("acme", f"s{record.record_id[1:]}")
        assert (record.conversation_id, record.slices) == (f"c{record.record_id[1:]}", {"language": "en"})
    assert hook.counters()["dropped.policy:no_consent"] == 4


def test_a_request_cut_off_by_its_client_is_one_aborted_record(tiny_target: Any, prompts: Prompts) -> None:
    log = MemoryLog()
    log.create_topic(TOPIC, num_partitions=1)
    hook = hook_on(log, tiny_target.fingerprint.digest)
    with EmbeddedEngine(tiny_target, EngineConfig(max_sequence=160), hook) as engine:
        engine.pause()
        future = engine.submit(Request("a", prompts[0], Sampling(max_tokens=40), tenant="acme"))
        engine.cancel("a")
        engine.resume()
        assert future.result(30).finish_reason == "abort"
    assert hook.close(5)
    (record,) = stored(log)
    assert (record.record_id, record.conversation_id, record.finish_reason) == ("a", "a", "abort")


def test_a_log_that_is_down_fails_no_request(tiny_target: Any, prompts: Prompts, plain: Prompts) -> None:
    def down() -> MemoryLog:
        raise ConnectionError("no broker")

    policy = ConsentPolicy(version="1", tenants={"acme": TenantConsent()})
    hook = CaptureHook(down, topic=TOPIC, policy=policy, target="t")
    requests = [
        Request(f"r{index}", prompt, Sampling(max_tokens=40), tenant="acme") for index, prompt in enumerate(prompts)
    ]
    with EmbeddedEngine(tiny_target, EngineConfig(max_sequence=160), hook) as engine:
        assert [each.output_ids for each in engine.generate(requests)] == plain
    hook.close(0.1)
    assert hook.flush(5)
    counters = hook.counters()
    assert counters["offered"] == 8
    assert counters["delivered"] == 0

"""Pause, load, resume, probe: as with the real engines, and whatever fails leaves the previous drafter live."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from draftloop.pipeline.errors import (  # noqa: E402
    CheckpointError,
    EngineError,
    FingerprintMismatchError,
    SwapFailedError,
    SwapRefusedError,
)
from draftloop.pipeline.losslessness import compare_greedy  # noqa: E402
from draftloop.pipeline.records import Sampling, SpecCounters  # noqa: E402
from draftloop.serving_hooks.embedded.core import BatchCore  # noqa: E402
from draftloop.serving_hooks.embedded.engine import EmbeddedEngine, EngineConfig, Request  # noqa: E402
from draftloop.trainers.checkpoint import tensor_digest  # noqa: E402

Prompts = list[tuple[int, ...]]
Publish = Callable[..., Path]
Make = Callable[..., Any]


class Stepper:
    """Holds the worker before every step, so that a test says when each one happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed = threading.Semaphore(0)
        self.free = False
        original = BatchCore.step

        def step(core: BatchCore) -> None:
            if not self.free:
                self.allowed.acquire(timeout=30)
            original(core)

        monkeypatch.setattr(BatchCore, "step", step)

    def run_free(self) -> None:
        self.free = True
        self.allowed.release()


@pytest.fixture
def engine(tiny_target: Any) -> Iterator[EmbeddedEngine]:
    config = EngineConfig(max_sequence=160, max_batch=8, floor="none")
    with EmbeddedEngine(tiny_target, config) as engine:
        yield engine


def load(engine: EmbeddedEngine, folder: Path | None, version: str | None) -> str:
    return engine.swap(folder, version).tensors


def test_loading_returns_the_digest_of_what_is_live(
    engine: EmbeddedEngine, make_drafter: Make, publish: Publish
) -> None:
    model = make_drafter(seed=1)
    assert load(engine, publish("a", model), "1") == tensor_digest(model)
    assert engine.drafter_version() == "1"
    assert load(engine, None, None) == ""
    assert engine.drafter_version() is None


def test_a_drafter_loaded_in_the_middle_drafts_as_if_it_had_been_there_from_the_start(
    tiny_target: Any, prompts: Prompts, plain: Prompts, trained_drafter: Any, publish: Publish
) -> None:
    """No dip: after the swap every step accepts exactly what it accepts on a fresh engine at the same token."""
    folder = publish("trained", trained_drafter)
    fresh = _accepted_at(tiny_target, prompts, folder, swap_after=None)
    swapped = _accepted_at(tiny_target, prompts, folder, swap_after=9)
    shared = fresh.keys() & swapped.keys()
    assert len(shared) > 20
    assert {at: fresh[at] for at in shared} == {at: swapped[at] for at in shared}
    assert sum(swapped.values()) > 0


def _accepted_at(target: Any, prompts: Prompts, folder: Path, *, swap_after: int | None) -> dict[tuple[int, int], int]:
    """(prompt, output tokens there were) -> accepted drafts of the step, for the steps drafted by the drafter."""
    core = BatchCore(target, EngineConfig(max_sequence=160, floor="none"), lambda state: done.append(state))
    done: list[Any] = []
    holder = EmbeddedEngine(target, EngineConfig())
    states = [
        holder._accept(Request(str(index), prompt, Sampling(max_tokens=40))) for index, prompt in enumerate(prompts)
    ]
    core.waiting.extend(states)
    from draftloop.trainers.checkpoint import open_drafter

    model = open_drafter(folder, fingerprint=target.fingerprint).model
    step = 0
    while core.has_work():
        if step == (swap_after or 0):
            core.drafter = core.make_runner(model)
        core.step()
        step += 1
    found = {}
    for state in done:
        outputs = 1
        for accepted, drafted in zip(state.accepted, state.drafted, strict=True):
            if drafted:
                found[int(state.request.request_id), outputs] = accepted
            outputs += accepted + 1
    return found


def test_a_swap_in_the_middle_of_requests_changes_no_token(
    tiny_target: Any,
    prompts: Prompts,
    plain: Prompts,
    trained_drafter: Any,
    make_drafter: Make,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = [publish("trained", trained_drafter), publish("other", make_drafter(seed=2, draft_vocab_size=131)), None]
    stepper = Stepper(monkeypatch)
    config = EngineConfig(max_sequence=160, max_batch=8)
    with EmbeddedEngine(tiny_target, config) as engine:
        futures = [
            engine.submit(Request(str(index), prompt, Sampling(max_tokens=40))) for index, prompt in enumerate(prompts)
        ]
        for version, folder in enumerate(folders):
            stepper.allowed.release()
            stepper.allowed.release()
            pausing = threading.Thread(target=engine.pause)
            pausing.start()
            stepper.allowed.release()  # the step that the pause waits for
            pausing.join(30)
            assert not pausing.is_alive()
            engine.load_drafter(folder, str(version))
            engine.resume()
        stepper.run_free()
        done = [future.result(60) for future in futures]
    assert [each.output_ids for each in done] == plain
    assert not any(future.exception() for future in futures)


def test_pause_holds_running_requests_and_resume_goes_on(
    engine: EmbeddedEngine, prompts: Prompts, plain: Prompts
) -> None:
    engine.pause()
    future = engine.submit(Request("a", prompts[0], Sampling(max_tokens=40)))
    with pytest.raises(TimeoutError):
        future.result(0.05)
    engine.resume()
    assert future.result(30).output_ids == plain[0]


def test_loading_without_a_pause_is_refused(engine: EmbeddedEngine, make_drafter: Make, publish: Publish) -> None:
    with pytest.raises(SwapRefusedError, match="while the engine runs"):
        engine.load_drafter(publish("a", make_drafter(seed=1)), "1")


def test_a_drafter_of_another_target_is_refused_and_the_previous_one_stays(
    engine: EmbeddedEngine, make_drafter: Make, publish: Publish, tiny_target: Any
) -> None:
    load(engine, publish("a", make_drafter(seed=1)), "1")
    other = dataclasses.replace(tiny_target.fingerprint, weights_digest="0" * 64)
    with pytest.raises(FingerprintMismatchError, match="weights_digest"):
        load(engine, publish("b", make_drafter(seed=2), other), "2")
    assert engine.drafter_version() == "1"


def test_an_altered_folder_is_refused_and_the_previous_one_stays(
    engine: EmbeddedEngine, make_drafter: Make, publish: Publish
) -> None:
    load(engine, publish("a", make_drafter(seed=1)), "1")
    folder = publish("b", make_drafter(seed=2))
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(CheckpointError, match="altered"):
        load(engine, folder, "2")
    assert engine.drafter_version() == "1"


def test_another_shape_is_refused_once_a_drafter_was_live(
    engine: EmbeddedEngine, make_drafter: Make, publish: Publish
) -> None:
    load(engine, publish("a", make_drafter(seed=1)), "1")
    load(engine, None, None)
    with pytest.raises(SwapRefusedError, match="draft_vocab_size 40 -> 50"):
        load(engine, publish("b", make_drafter(seed=2, draft_vocab_size=50)), "2")
    assert engine.drafter_version() is None
    load(engine, publish("c", make_drafter(seed=3)), "3")
    assert engine.drafter_version() == "3"


def test_a_drafter_that_fails_while_its_cache_is_rebuilt_leaves_the_previous_one_live(
    engine: EmbeddedEngine, make_drafter: Make, publish: Publish, prompts: Prompts, plain: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    load(engine, publish("a", make_drafter(seed=1)), "1")

    def fail(core: BatchCore, model: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(BatchCore, "make_runner", fail)
    with pytest.raises(SwapFailedError, match=r"out of memory; '1' still serves"):
        load(engine, publish("b", make_drafter(seed=2)), "2")
    assert engine.drafter_version() == "1"
    assert engine.probe(prompts, 40).output_ids == tuple(plain)  # and the engine goes on


def test_a_probe_is_greedy_and_not_counted_and_tells_margins(
    engine: EmbeddedEngine, prompts: Prompts, plain: Prompts, tiny_target: Any
) -> None:
    found = engine.probe(prompts, 40)
    assert found.output_ids == tuple(plain)
    assert engine.counters() == SpecCounters()
    emitted = sum(len(output) - 1 for output in plain)
    assert found.counters == SpecCounters(emitted, emitted, 0, 0)
    text = torch.tensor([[*prompts[2], *plain[2]]])
    best = tiny_target.model(text).logits[0, len(prompts[2]) - 1 : -1].topk(2).values
    assert found.margins[2] == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-4)


def test_probes_before_and_after_a_swap_are_equal_and_the_counters_show_the_gain(
    engine: EmbeddedEngine, prompts: Prompts, trained_drafter: Any, publish: Publish
) -> None:
    before = engine.probe(prompts, 40)
    load(engine, publish("trained", trained_drafter), "1")
    after = engine.probe(prompts, 40)
    assert compare_greedy(before, after, 0.0).identical
    assert before.counters.tau == 1.0
    assert after.counters.tau > 1.5


def test_a_probe_while_paused_says_so_instead_of_waiting(engine: EmbeddedEngine, prompts: Prompts) -> None:
    engine.pause()
    with pytest.raises(EngineError, match="paused"):
        engine.probe(prompts, 4)


def test_a_cancelled_request_ends_with_the_tokens_it_has(
    tiny_target: Any, prompts: Prompts, plain: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = Stepper(monkeypatch)
    with EmbeddedEngine(tiny_target, EngineConfig(max_sequence=160, max_batch=1, floor="none")) as engine:
        running = engine.submit(Request("a", prompts[2], Sampling(max_tokens=40)))
        waiting = engine.submit(Request("b", prompts[3], Sampling(max_tokens=40)))
        for _ in range(9):
            stepper.allowed.release()
        pausing = threading.Thread(target=engine.pause)
        while engine.counters().num_steps < 9:
            threading.Event().wait(0.001)
        pausing.start()
        stepper.allowed.release()
        pausing.join(30)
        engine.cancel("a")
        engine.cancel("b")
        engine.cancel("never seen")
        engine.resume()
        stepper.run_free()
        done = running.result(30)
        nothing = waiting.result(30)
    assert done.finish_reason == "abort"
    assert len(done.output_ids) in (10, 11)
    assert done.output_ids == plain[2][: len(done.output_ids)]
    assert (nothing.finish_reason, nothing.output_ids) == ("abort", ())


def test_stopping_ends_unfinished_requests_as_aborted(tiny_target: Any, prompts: Prompts) -> None:
    engine = EmbeddedEngine(tiny_target, EngineConfig(max_sequence=160))
    engine.start()
    engine.pause()
    future = engine.submit(Request("a", prompts[0], Sampling(max_tokens=40)))
    engine.stop()
    assert future.result(5).finish_reason == "abort"
    with pytest.raises(EngineError, match="not running"):
        engine.submit(Request("b", prompts[0], Sampling()))


def test_a_failing_step_answers_everybody_who_waits(
    tiny_target: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(core: BatchCore) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(BatchCore, "step", fail)
    with EmbeddedEngine(tiny_target, EngineConfig(max_sequence=160)) as engine:
        future = engine.submit(Request("a", prompts[0], Sampling(max_tokens=40)))
        with pytest.raises(EngineError, match="broken"):
            future.result(30)
        with pytest.raises(EngineError, match="build a new engine"):
            engine.submit(Request("b", prompts[0], Sampling()))

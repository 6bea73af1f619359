"""The embedded engine against plain decoding: a drafter changes the number of steps and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from draftloop.pipeline.data.snapshot import Row  # noqa: E402
from draftloop.pipeline.errors import ConfigError, EngineError, InputError  # noqa: E402
from draftloop.pipeline.judge.replay import replay  # noqa: E402
from draftloop.pipeline.records import Sampling, SpecCounters  # noqa: E402
from draftloop.serving_hooks.embedded.engine import Completion, EmbeddedEngine, EngineConfig, Request  # noqa: E402
from draftloop.serving_hooks.embedded.target_runner import TargetRunner  # noqa: E402
from draftloop.trainers.checkpoint import open_drafter  # noqa: E402

Prompts = list[tuple[int, ...]]


def requests_of(prompts: Prompts, sampling: Sampling | None = None) -> list[Request]:
    chosen = sampling or Sampling(max_tokens=40)
    return [Request(f"r{index}", prompt, chosen) for index, prompt in enumerate(prompts)]


def run(
    target: Any, requests: list[Request], folder: Path | None = None, **settings: Any
) -> tuple[list[Completion], SpecCounters]:
    with EmbeddedEngine(target, EngineConfig(max_sequence=160, **settings)) as engine:
        if folder is not None:
            engine.pause()
            engine.load_drafter(folder, "1")
            engine.resume()
        return engine.generate(requests), engine.counters()


def check_counts(completions: list[Completion], counters: SpecCounters) -> None:
    for each in completions:
        assert sum(each.accepted) + len(each.accepted) == len(each.output_ids) - 1
        assert len(each.accepted) == len(each.drafted)
        assert all(accepted <= drafted for accepted, drafted in zip(each.accepted, each.drafted, strict=True))
    assert counters.num_steps == sum(len(each.accepted) for each in completions)
    assert counters.num_emitted == sum(len(each.output_ids) - 1 for each in completions)
    assert counters.num_drafted == sum(sum(each.drafted) for each in completions)
    assert counters.num_accepted == sum(sum(each.accepted) for each in completions)


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("floor", ["none", "ngram"])
def test_greedy_output_without_a_drafter_is_that_of_plain_decoding(
    tiny_target: Any, prompts: Prompts, plain: Prompts, max_batch: int, floor: str
) -> None:
    done, counters = run(tiny_target, requests_of(prompts), max_batch=max_batch, floor=floor)
    assert [each.output_ids for each in done] == plain
    check_counts(done, counters)
    assert (counters.tau == 1.0) == (floor == "none")


@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("depth", [1, 4])
def test_greedy_output_with_a_random_drafter_is_that_of_plain_decoding(
    tiny_target: Any,
    prompts: Prompts,
    plain: Prompts,
    make_drafter: Callable[..., Any],
    publish: Callable[..., Path],
    max_batch: int,
    depth: int,
) -> None:
    folder = publish("random", make_drafter(seed=1))
    done, counters = run(tiny_target, requests_of(prompts), folder, max_batch=max_batch, num_speculative_tokens=depth)
    assert [each.output_ids for each in done] == plain
    check_counts(done, counters)
    assert counters.num_drafted > 0


@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_a_trained_drafter_saves_steps_and_changes_no_token(
    tiny_target: Any,
    prompts: Prompts,
    plain: Prompts,
    trained_drafter: Any,
    publish: Callable[..., Path],
    max_batch: int,
) -> None:
    done, counters = run(tiny_target, requests_of(prompts), publish("trained", trained_drafter), max_batch=max_batch)
    assert [each.output_ids for each in done] == plain
    check_counts(done, counters)
    assert counters.tau > 1.5
    assert {each.drafter_version for each in done} == {"1"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_of_the_engines_log_counts_the_engines_steps(
    tiny_target: Any, prompts: Prompts, trained_drafter: Any, publish: Callable[..., Path], temperature: float
) -> None:
    folder = publish("trained", trained_drafter)
    requests = requests_of(prompts, Sampling(max_tokens=40, temperature=temperature, seed=11))
    done, counters = run(tiny_target, requests, folder, max_batch=4)
    rows = [
        Row(each.request_id, each.request_id, list(each.prompt_ids), list(each.output_ids), {}, temperature, [])
        for each in done
    ]
    drafter = open_drafter(folder, fingerprint=tiny_target.fingerprint)
    report = replay(tiny_target, {"x": drafter}, rows, k=4, snapshot_id="s")["x"]
    assert [each.num_steps for each in report.requests] == [len(each.accepted) for each in done]
    assert report.tau == pytest.approx(counters.tau)


def test_replay_of_the_ngram_floor_counts_the_engines_steps(tiny_target: Any, prompts: Prompts) -> None:
    done, counters = run(tiny_target, requests_of(prompts), max_batch=4, floor="ngram")
    rows = [Row(each.request_id, "c", list(each.prompt_ids), list(each.output_ids), {}, 0.0, []) for each in done]
    report = replay(tiny_target, {"floor": "ngram"}, rows, k=4, snapshot_id="s")["floor"]
    assert [each.num_steps for each in report.requests] == [len(each.accepted) for each in done]
    assert report.tau == pytest.approx(counters.tau)


def test_sampled_output_of_a_seed_does_not_depend_on_batch_mates(tiny_target: Any, prompts: Prompts) -> None:
    requests = requests_of(prompts, Sampling(max_tokens=30, temperature=0.9, top_p=0.8, top_k=20, seed=4))
    alone, _ = run(tiny_target, requests, max_batch=1, floor="none")
    together, _ = run(tiny_target, requests, max_batch=8, floor="none")
    assert [each.output_ids for each in alone] == [each.output_ids for each in together]


def test_the_same_requests_give_the_same_outputs_in_the_same_order_of_finishing(
    tiny_target: Any, prompts: Prompts, trained_drafter: Any, publish: Callable[..., Path]
) -> None:
    folder = publish("trained", trained_drafter)
    sampling = Sampling(max_tokens=25, temperature=1.2)
    seen = []
    for _ in range(2):
        with EmbeddedEngine(tiny_target, EngineConfig(max_batch=3, max_sequence=160)) as engine:
            engine.pause()
            engine.load_drafter(folder, "1")
            engine.resume()
            order: list[Completion] = []
            engine.generate(requests_of(prompts, sampling), on_done=order.append)
        seen.append(order)
    assert seen[0] == seen[1]
    assert len({each.output_ids for each in seen[0]}) == len(prompts)


def test_top_k_one_is_greedy_at_any_temperature(tiny_target: Any, prompts: Prompts, plain: Prompts) -> None:
    done, _ = run(tiny_target, requests_of(prompts, Sampling(max_tokens=40, temperature=2.0, top_k=1)))
    assert [each.output_ids for each in done] == plain


def test_logprobs_are_those_of_the_distribution_sampled_from(tiny_target: Any, prompts: Prompts) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.7, seed=2)
    done, _ = run(tiny_target, requests_of(prompts[3:5], sampling), capture_logprobs=True, floor="ngram")
    for each in done:
        text = torch.tensor([[*each.prompt_ids, *each.output_ids]])
        logits = tiny_target.model(text).logits[0, len(each.prompt_ids) - 1 : -1]
        wanted = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(each.output_ids).unsqueeze(1)).squeeze(1)
        assert each.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


def test_a_stop_token_inside_an_accepted_chain_ends_the_output_there(
    tiny_target: Any, prompts: Prompts, plain: Prompts, trained_drafter: Any, publish: Callable[..., Path]
) -> None:
    stop = plain[3][6]
    first = plain[3].index(stop)
    before = tiny_target.model.generation_config.eos_token_id
    tiny_target.model.generation_config.eos_token_id = [1, stop]
    try:
        done, counters = run(tiny_target, requests_of(prompts[3:4]), publish("trained", trained_drafter))
    finally:
        tiny_target.model.generation_config.eos_token_id = before
    assert done[0].output_ids == plain[3][: first + 1]
    assert done[0].finish_reason == "stop"
    check_counts(done, counters)


def test_one_output_token_takes_no_step_after_prefill(tiny_target: Any, prompts: Prompts, plain: Prompts) -> None:
    done, counters = run(tiny_target, requests_of(prompts, Sampling(max_tokens=1)))
    assert [each.output_ids for each in done] == [output[:1] for output in plain]
    assert counters == SpecCounters()


def test_zero_max_tokens_means_what_fits(tiny_target: Any, prompts: Prompts) -> None:
    done, _ = run(tiny_target, requests_of(prompts[7:], Sampling()))
    assert len(done[0].output_ids) == 160 - 70 or done[0].finish_reason == "stop"


def test_drafts_stop_at_the_drafters_position_limit(
    tiny_target: Any, prompts: Prompts, plain: Prompts, make_drafter: Callable[..., Any], publish: Callable[..., Path]
) -> None:
    folder = publish("short", make_drafter(seed=1, max_position_embeddings=75))
    done, counters = run(tiny_target, requests_of(prompts), folder, floor="none")
    assert [each.output_ids for each in done] == plain
    check_counts(done, counters)
    assert done[7].drafted[:2] == (4, 4)
    assert set(done[7].drafted[-20:]) == {0}


def test_requests_that_do_not_fit_are_refused_with_the_setting_to_change(tiny_target: Any) -> None:
    with EmbeddedEngine(tiny_target, EngineConfig(max_sequence=8)) as engine:
        with pytest.raises(InputError, match=r"prompt of 8 tokens.*max_sequence = 8"):
            engine.submit(Request("a", (3,) * 8, Sampling()))
        with pytest.raises(InputError, match="prompt of 0 tokens"):
            engine.submit(Request("a", (), Sampling()))
        with pytest.raises(InputError, match=r"outside 0\.\.135"):
            engine.submit(Request("a", (136,), Sampling()))
        with pytest.raises(InputError, match=r"top_p=0\.0"):
            engine.submit(Request("a", (3,), Sampling(top_p=0.0)))


@pytest.mark.parametrize("prompt", [(5, 1.5), (5, "6"), (5, None), (True,)])
def test_ids_that_are_no_integers_are_refused_and_everybody_else_is_served(tiny_target: Any, prompt: Any) -> None:
    with EmbeddedEngine(tiny_target, EngineConfig(max_sequence=32)) as engine:
        with pytest.raises(InputError, match="or no integer"):
            engine.submit(Request("bad", prompt, Sampling(max_tokens=4)))
        assert len(engine.generate([Request("good", (5, 6), Sampling(max_tokens=4))])[0].output_ids) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1.0, "seed": 10**30},
        {"temperature": 1.0, "seed": 1.5},
        {"temperature": 1.0, "top_k": 10**30},
        {"temperature": 1.0, "top_k": 2.5},
        {"max_tokens": 2.5},
    ],
)
def test_settings_that_cannot_be_computed_with_are_refused_and_everybody_else_is_served(
    tiny_target: Any, settings: dict[str, Any]
) -> None:
    with EmbeddedEngine(tiny_target, EngineConfig(max_sequence=32)) as engine:
        with pytest.raises(InputError, match="request bad: Sampling"):
            engine.submit(Request("bad", (5, 6), Sampling(**{"max_tokens": 4, **settings})))
        assert len(engine.generate([Request("good", (5, 6), Sampling(max_tokens=4))])[0].output_ids) > 0


def test_a_temperature_too_small_to_divide_by_is_greedy(tiny_target: Any, prompts: Prompts, plain: Prompts) -> None:
    done, _ = run(tiny_target, requests_of(prompts, Sampling(temperature=1e-40, max_tokens=40)))
    assert [each.output_ids for each in done] == plain


def test_two_live_requests_cannot_share_an_id(tiny_target: Any) -> None:
    with (
        EmbeddedEngine(tiny_target, EngineConfig(max_sequence=8)) as engine,
        pytest.raises(InputError, match="'a' is in use"),
    ):
        engine.generate([Request("a", (3,), Sampling()), Request("a", (4,), Sampling())])


def test_an_engine_that_was_not_started_says_so(tiny_target: Any) -> None:
    with pytest.raises(EngineError, match="start"):
        EmbeddedEngine(tiny_target, EngineConfig()).submit(Request("a", (3,), Sampling()))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_slot_forward_equals_the_models_own(family: str) -> None:
    from types import SimpleNamespace

    import transformers

    torch.manual_seed(0)
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    fingerprint = SimpleNamespace(tap_layers=(0, 2))
    target: Any = SimpleNamespace(model=model, fingerprint=fingerprint, embedding=model.get_input_embeddings().weight)
    runner = TargetRunner(target, num_slots=3, num_rows=20)
    ids = torch.randint(0, 50, (2, 9))
    runner.forward(ids[:, :5], 1, torch.tensor([0, 0]))
    runner.forward(ids[:1, 5:7], 1, torch.tensor([5]))
    done = runner.forward(torch.stack([ids[0, 7:9], ids[1, 5:7]]), 1, torch.tensor([7, 5]))
    whole = model.model(ids, output_hidden_states=True)
    logits = model(ids).logits
    torch.testing.assert_close(runner.logits(done.last)[0], logits[0, 7:9])
    torch.testing.assert_close(runner.logits(done.last)[1], logits[1, 5:7])
    torch.testing.assert_close(done.taps[0], torch.stack([whole.hidden_states[k][0, 7:9] for k in (0, 2)], dim=1))


def test_an_architecture_with_other_attention_is_refused() -> None:
    from types import SimpleNamespace

    target: Any = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(model_type="gpt2")))
    with pytest.raises(ConfigError, match="'gpt2'"):
        TargetRunner(target, num_slots=1, num_rows=4)


def test_packed_weights_give_the_logits_of_the_modules_themselves() -> None:
    from draftloop.serving_hooks.embedded.packed import PackedLinears

    torch.manual_seed(0)
    module = torch.nn.Linear(64, 96, dtype=torch.bfloat16).requires_grad_(False)
    wide = torch.nn.Linear(64, 96).requires_grad_(False)
    packed = PackedLinears(enabled=True)
    packed.add(module)
    packed.add(wide)  # fp32 stays as it is
    assert packed.num_packed in (0, 1)
    x = torch.randn(5, 7, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(packed(module, x), module(x))
    torch.testing.assert_close(packed(wide, x.float()), wide(x.float()), rtol=0, atol=0)
    assert PackedLinears(enabled=False).num_packed == 0


def test_rows_that_nobody_wrote_reach_no_output(
    tiny_target: Any, prompts: Prompts, plain: Prompts, trained_drafter: Any, publish: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Fresh memory may hold NaN: stores must not be made of it, or a hidden row of weight 0 spoils the sum."""
    empty = torch.empty

    def poisoned(*shape: Any, **settings: Any) -> Any:
        made = empty(*shape, **settings)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    done, counters = run(tiny_target, requests_of(prompts), publish("trained", trained_drafter), max_batch=8)
    assert [each.output_ids for each in done] == plain
    assert counters.tau > 1.5


def test_a_packed_drafter_proposes_what_the_plain_one_proposes(make_drafter: Callable[..., Any]) -> None:
    from draftloop.serving_hooks.embedded.packed import pack_in_place

    plain_model, packed_model = (make_drafter(seed=3).to(torch.bfloat16) for _ in range(2))
    pack_in_place(packed_model)
    taps, embeds = torch.randn(2, 5, 3, 32, dtype=torch.bfloat16), torch.randn(2, 5, 32, dtype=torch.bfloat16)
    found = []
    for model in (plain_model, packed_model):
        projected = model.project(embeds, model.fuse(taps), torch.arange(5).expand(2, 5))
        found.append(model.logits(model.finish(projected.query, projected.residual)))
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0.05)

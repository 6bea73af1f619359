"""Replay against a slow serving loop that drafts token by token with explicit attention."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from draftloop.kernels.ngram import propose_ngram  # noqa: E402
from draftloop.pipeline.data.snapshot import Row  # noqa: E402
from draftloop.pipeline.errors import FingerprintMismatchError, InputError  # noqa: E402
from draftloop.pipeline.judge.replay import ReplayProgress, ReplayReport, RequestReplay, replay  # noqa: E402
from draftloop.trainers.checkpoint import Drafter, open_drafter, publish_drafter  # noqa: E402
from draftloop.trainers.eagle3 import Eagle3, Eagle3Config  # noqa: E402

K = 3


def make_drafter(
    target: Any, folder: Path, *, seed: int = 0, fingerprint: Any = None, max_positions: int = 512
) -> Drafter:
    torch.manual_seed(seed)
    config = Eagle3Config(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=max_positions,
        vocab_size=136,
        draft_vocab_size=50,
        num_taps=3,
    )
    model = Eagle3(config, torch.arange(50) * 2 + 3)
    own = fingerprint or target.fingerprint
    publish_drafter(folder, model, fingerprint=own, snapshot_id=None, parents=[], training={})
    return open_drafter(folder, fingerprint=own)


@pytest.fixture(scope="module")
def drafter(tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return make_drafter(tiny_target, tmp_path_factory.mktemp("drafters") / "one")


def attend(query: Any, key: Any, value: Any) -> Any:
    """One query row [Q, D] over keys and values [S, K, D], in plain softmax."""
    repeat = query.shape[0] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    weights = torch.einsum("qd,sqd->qs", query, key).div(query.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("qs,sqd->qd", weights, value)


@torch.no_grad()
def serving_drafts(target: Any, model: Eagle3, ids: list[int]) -> list[int]:
    """Drafts once the target has processed ids[:-1] and emitted ids[-1]: rows 0..n-1, then the drafter's own output."""
    taps = target.features(torch.tensor([ids[:-1]])).taps
    embed = torch.nn.functional.embedding
    rows = model.project(
        embed(torch.tensor([ids[1:]]), target.embedding), model.fuse(taps), torch.arange(len(ids) - 1)[None]
    )
    key, value, query, residual = rows.key[0], rows.value[0], rows.query[0, -1], rows.residual[:, -1:]
    drafts: list[int] = []
    for depth in range(K):
        hidden = model.finish(attend(query, key, value)[None, None], residual)
        drafts.append(int(model.to_target_ids(model.logits(hidden)[0, 0].argmax(-1))))
        position = torch.tensor([[len(ids) - 2 + depth + 1]])
        row = model.project(embed(torch.tensor([[drafts[-1]]]), target.embedding), hidden, position)
        key, value = torch.cat([key, row.key[0]]), torch.cat([value, row.value[0]])
        query, residual = row.query[0, -1], row.residual
    return drafts


def serve(target: Any, model: Eagle3, prompt: list[int], length: int, rng: random.Random) -> tuple[Row, int, list[int]]:
    """Write an output that accepts a random number of drafts a step: (row, steps, steps with >= k accepted)."""
    ids, end = [*prompt, rng.randrange(3, 131)], len(prompt) + length
    steps, at_least = 0, [0] * K
    while len(ids) < end:
        drafts = serving_drafts(target, model, ids)
        accepted = min(rng.randrange(K + 1), end - len(ids))
        ids += drafts[:accepted]
        steps += 1
        for depth in range(accepted):
            at_least[depth] += 1
        if len(ids) < end:
            forbidden = drafts[accepted] if accepted < K else None
            ids.append(rng.choice([token for token in range(3, 131) if token != forbidden]))
    record = f"r{rng.random()}"
    return Row(record, f"c-{record}", prompt, ids[len(prompt) :], {"domain": "x"}, 0.0, []), steps, at_least


def test_replay_counts_exactly_the_steps_and_acceptances_of_serving(tiny_target: Any, drafter: Drafter) -> None:
    rng = random.Random(4)
    served = [
        serve(
            tiny_target,
            drafter.model,
            [rng.randrange(3, 131) for _ in range(rng.randrange(1, 9))],
            rng.randrange(1, 30),
            rng,
        )
        for _ in range(12)
    ]
    rows = [row for row, _, _ in served]
    report = replay(tiny_target, {"x": drafter}, rows, k=K, snapshot_id="s", batch_tokens=80)["x"]
    assert [request.record_id for request in report.requests] == [row.record_id for row in rows]
    assert [(request.num_steps, list(request.accepted_at_least)) for request in report.requests] == [
        (steps, at_least) for _, steps, at_least in served
    ]
    assert report.tau == sum(len(row.output_ids) - 1 for row in rows) / sum(steps for _, steps, _ in served)
    assert report.tau > 1.5


@pytest.mark.parametrize(
    ("limit", "steps", "at_least"), [(8, 4, (0, 0, 0)), (9, 3, (1, 0, 0)), (10, 2, (1, 1, 0)), (512, 1, (1, 1, 1))]
)
def test_drafts_stop_at_the_drafters_position_limit_as_in_the_engine(
    tiny_target: Any, drafter: Drafter, tmp_path: Path, limit: int, steps: int, at_least: tuple[int, ...]
) -> None:
    """A prompt of 9: the first draft's row sits at position 8. The output is what the drafter proposes at once."""
    prompt = [11, 21, 31, 41, 51, 61, 71, 81, 91]
    row = Row("r", "c", prompt, [7, *serving_drafts(tiny_target, drafter.model, [*prompt, 7]), 4], {}, 0.0, [])
    short = make_drafter(tiny_target, tmp_path / "short", max_positions=limit)
    request = replay(tiny_target, {"x": short}, [row], k=K, snapshot_id="s")["x"].requests[0]
    assert (request.num_steps, request.accepted_at_least) == (steps, at_least)


def random_rows(count: int, seed: int) -> list[Row]:
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randrange(3, 9) for _ in range(length)]

    return [
        Row(f"r{index}", f"c{index // 2}", ids(rng.randrange(1, 9)), ids(rng.randrange(1, 25)), {}, 0.0, [])
        for index in range(count)
    ]


def test_the_batch_budget_changes_nothing_but_the_number_of_forwards(tiny_target: Any, drafter: Drafter) -> None:
    rows = random_rows(9, 1)
    seen: list[ReplayProgress] = []
    whole = replay(tiny_target, {"x": drafter}, rows, k=K, snapshot_id="s", on_progress=seen.append)
    assert len(seen) == 1
    singles = replay(tiny_target, {"x": drafter}, rows, k=K, snapshot_id="s", batch_tokens=1, on_progress=seen.append)
    assert singles == whole
    assert len(seen) == 10
    total = sum(len(row.prompt_ids) + len(row.output_ids) for row in rows)
    assert seen[-1] == ReplayProgress(9, 9, total, total)


def test_features_are_computed_once_for_all_drafters(
    tiny_target: Any, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_drafter(tiny_target, tmp_path / "other", seed=5)
    calls: list[int] = []
    real = tiny_target.features
    monkeypatch.setattr(tiny_target, "features", lambda ids: calls.append(1) or real(ids))
    reports = replay(tiny_target, {"a": drafter, "b": other, "none": None}, random_rows(4, 2), k=K, snapshot_id="s")
    assert len(calls) == 1
    assert reports["a"].drafter_digest == drafter.digest != reports["b"].drafter_digest
    assert reports["a"].target == tiny_target.fingerprint.digest


def test_no_drafter_has_a_tau_of_exactly_one_and_needs_no_forward(
    tiny_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_target, "features", None)
    report = replay(tiny_target, {"none": None}, random_rows(5, 3), k=K, snapshot_id="s")["none"]
    assert report.tau == 1.0
    assert report.position_rates == report.conditional_rates == (0.0, 0.0, 0.0)


def test_the_first_output_token_is_neither_token_nor_step(tiny_target: Any, drafter: Drafter) -> None:
    row = Row("r", "c", [5, 6], [7], {}, 0.0, [])
    reports = replay(tiny_target, {"x": drafter, "none": None, "floor": "ngram"}, [row], k=K, snapshot_id="s")
    for report in reports.values():
        assert (report.num_tokens, report.num_steps, report.tau) == (0, 0, 1.0)


def test_the_ngram_floor_walks_like_the_engine(tiny_target: Any) -> None:
    row = Row("r", "c", [5, 6, 7, 8, 9, 5], [6, 7, 8, 1, 2, 3, 7, 8, 9, 9], {}, 0.0, [])
    report = replay(tiny_target, {"floor": "ngram"}, [row], k=K, snapshot_id="s")["floor"]
    # After "5 6": 7, 8 accepted, 9 refused, 1 in its place; then one token a step: 2; 3; 7; 8; 9 (after the second
    # "7 8" the most recent continuation was 1, not 9); 9.
    assert report.requests[0].num_steps == 7
    assert report.requests[0].accepted_at_least == (1, 1, 0)
    assert report.requests[0].num_tokens == 9


@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6), output=st.lists(st.integers(0, 2), min_size=1))
def test_the_ngram_floor_emits_every_token_once(tiny_target: Any, prompt: list[int], output: list[int]) -> None:
    row = Row("r", "c", prompt, output, {}, 0.0, [])
    request = replay(tiny_target, {"floor": "ngram"}, [row], k=K, snapshot_id="s")["floor"].requests[0]
    known, steps = len(prompt) + 1, 0
    ids = prompt + output
    while known < len(ids):
        proposed = [*propose_ngram(ids[:known], k=K), None]
        accepted = next(d for d in range(len(proposed)) if known + d >= len(ids) or proposed[d] != ids[known + d])
        known, steps = known + accepted + 1, steps + 1
    assert request.num_steps == steps
    assert request.num_clipped in (0, 1)


def test_a_drafter_of_another_target_is_refused_by_name(tiny_target: Any, tmp_path: Path) -> None:
    other = dataclasses.replace(tiny_target.fingerprint, rope_theta=5.0)
    stranger = make_drafter(tiny_target, tmp_path / "stranger", fingerprint=other)
    with pytest.raises(FingerprintMismatchError, match=r"drafter 'odd'.*rope_theta"):
        replay(tiny_target, {"odd": stranger}, random_rows(1, 1), k=K, snapshot_id="s")


@pytest.mark.parametrize(
    ("row", "k", "drafters", "message"),
    [
        (Row("bad", "c", [], [1], {}, 0.0, []), K, {"none": None}, "record bad has 0 prompt and 1 output"),
        (Row("bad", "c", [1], [], {}, 0.0, []), K, {"none": None}, "record bad has 1 prompt and 0 output"),
        (Row("r", "c", [1], [1], {}, 0.0, []), 0, {"none": None}, "k=0"),
        (Row("r", "c", [1], [1], {}, 0.0, []), K, {"x": "eagle"}, "'x' is 'eagle'"),
    ],
)
def test_bad_input_is_named(tiny_target: Any, row: Row, k: int, drafters: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replay(tiny_target, drafters, [row], k=k, snapshot_id="s")


def test_no_rows_give_an_empty_report(tiny_target: Any, drafter: Drafter) -> None:
    report = replay(tiny_target, {"x": drafter}, [], k=K, snapshot_id="s")["x"]
    assert report.requests == ()
    assert report.tau == 1.0


def one(record: str, domain: str, tokens: int, steps: int, *at_least: int) -> RequestReplay:
    return RequestReplay(
        record_id=record,
        conversation_id=record,
        slices={"domain": domain} if domain else {},
        num_tokens=tokens,
        num_steps=steps,
        accepted_at_least=at_least,
    )


REPORT = ReplayReport(
    drafter="x",
    snapshot_id="s",
    k=2,
    requests=(one("a", "code", 10, 4, 4, 3), one("b", "chat", 10, 8, 2, 0), one("c", "", 2, 1, 1, 0)),
)


def test_the_report_is_step_weighted_and_labels_its_rates() -> None:
    assert REPORT.tau == 22 / 13
    assert REPORT.mean_request_tau == pytest.approx((2.5 + 1.25 + 2) / 3)
    assert REPORT.position_rates == (7 / 13, 3 / 13)
    assert REPORT.conditional_rates == (7 / 13, 3 / 7)
    assert REPORT.tau_by_slice("domain") == {"(none)": 2.0, "chat": 1.25, "code": 2.5}


def test_tau_is_one_plus_the_position_rates_up_to_the_clipped_ends() -> None:
    clipped = sum(request.num_clipped for request in REPORT.requests)
    assert [request.num_clipped for request in REPORT.requests] == [1, 0, 0]
    assert REPORT.tau == pytest.approx(1 + sum(REPORT.position_rates) - clipped / REPORT.num_steps)


def test_a_report_survives_json_exactly() -> None:
    assert ReplayReport.from_json(REPORT.to_json()) == REPORT
    with pytest.raises(InputError, match="not a replay report"):
        ReplayReport.from_json(b'{"k": 1}')

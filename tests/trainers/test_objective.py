"""Alignment, masks and gradients of the EAGLE-3 objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftloop.trainers.batches import Batch, Document, DocumentFeatures, collate, documents_of, supervision
from draftloop.trainers.config import TrainConfig
from draftloop.trainers.eagle3 import Eagle3, Eagle3Config
from draftloop.trainers.heldout import walk
from draftloop.trainers.objective import Objective
from draftloop.trainers.start import first_drafter, teacher_head
from draftloop.trainers.unroll import propose

STEPS = 3


def _features(target: Any, documents: list[Document]) -> list[DocumentFeatures]:
    found = []
    for document in documents:
        taps, last = target.features(document.token_ids[None])
        teacher = last[0, document.first + 1 : -1]
        found.append(DocumentFeatures(taps[0, :-2], teacher, (teacher @ target.head.T).argmax(-1)))
    return found


def _objective(target: Any, snapshot: Any, dtype: torch.dtype = torch.float32) -> tuple[Objective, list[Document]]:
    rows = snapshot.rows("train")
    config = TrainConfig(draft_vocab_size=40, ttt_steps=STEPS)
    model = first_drafter(target, [row.output_ids for row in rows], config)
    with torch.no_grad():  # norms away from 1, as after training
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    model.lm_head.requires_grad_(False)
    head = teacher_head(target, model.draft_token_ids)
    return Objective(model, target.embedding, head, steps=STEPS, dtype=dtype), documents_of(rows)


def _batch(target: Any, objective: Objective, documents: list[Document]) -> Batch:
    features = _features(target, documents)
    return collate(documents, features, objective.model.t2d, steps=STEPS, decay=0.8, device=torch.device("cpu"))


def _gradients(objective: Objective, loss: Tensor) -> dict[str, Tensor]:
    named = {name: parameter for name, parameter in objective.named_parameters() if parameter.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def test_rows_pair_token_i_with_token_i_plus_one_and_anchors_begin_before_the_output() -> None:
    document = Document("r", torch.tensor([10, 11, 12, 20, 21, 22]), prompt_length=3, greedy=True)
    features = DocumentFeatures(torch.zeros(4, 2, 8), torch.zeros(3, 8), torch.tensor([20, 21, 22]))
    batch = collate(
        [document], [features], torch.ones(30, dtype=torch.bool), steps=3, decay=0.5, device=torch.device("cpu")
    )
    assert batch.next_ids.tolist() == [11, 12, 20, 21]
    assert batch.anchors.tolist() == [1, 2, 3]  # propose tokens 3, 4, 5: the output
    assert batch.deeper_ids.tolist() == [[20, 21, 22], [21, 22, 0]]
    assert batch.weight.tolist() == [[1, 1, 1], [0, 0.5, 0.5], [0, 0, 0.25]]


def test_choices_outside_the_draft_vocabulary_are_not_supervised() -> None:
    kept = torch.tensor([True, False, True])
    assert supervision(3, kept, 2, 0.8).tolist() == [[1, 0, 1], [0, 0, pytest.approx(0.8)]]


def test_a_prompt_of_one_token_and_an_output_of_one_token_are_handled() -> None:
    short = Document("a", torch.tensor([5, 6, 7]), prompt_length=1, greedy=True)
    assert (short.first, short.num_positions, short.num_anchors) == (0, 1, 1)

    class Row:
        record_id, prompt_ids, output_ids, temperature = "b", [5], [6], 0.0

    assert documents_of([Row()]) == []


def test_the_fast_objective_equals_the_reference_in_loss_and_every_gradient(
    tiny_target: Any, tiny_snapshot: Any
) -> None:
    objective, documents = _objective(tiny_target, tiny_snapshot)
    batch = _batch(tiny_target, objective, documents)
    fast, plain = objective(batch), objective.reference(batch)
    torch.testing.assert_close(fast, plain)
    want = _gradients(objective, plain)
    for name, have in _gradients(objective, fast).items():
        torch.testing.assert_close(have, want[name], rtol=1e-3, atol=1e-5, msg=name)


def test_the_training_forward_proposes_what_the_plain_unroll_proposes(tiny_target: Any, tiny_snapshot: Any) -> None:
    objective, documents = _objective(tiny_target, tiny_snapshot)
    packed = objective.drafts(_batch(tiny_target, objective, documents))
    width = max(len(document.token_ids) for document in documents)
    ids = torch.zeros(len(documents), width, dtype=torch.int64)
    for row, document in enumerate(documents):
        ids[row, : len(document.token_ids)] = document.token_ids
    lengths = torch.tensor([len(document.token_ids) for document in documents])
    taps = tiny_target.features(ids, (torch.arange(width) < lengths[:, None]).long()).taps
    padded = propose(objective.model, tiny_target.embedding, taps, ids, lengths, k=STEPS)
    start = 0
    for row, document in enumerate(documents):
        for depth in range(STEPS):
            valid = document.num_anchors - depth  # beyond, the draft has no token to compete with
            have = packed[depth, start : start + valid]
            assert have.tolist() == padded[row, document.first : document.first + valid, depth].tolist()
        start += document.num_anchors


@torch.no_grad()
def test_teacher_forced_proposals_equal_drafting_with_a_cache_while_drafts_are_accepted(tiny_target: Any) -> None:
    """Serving: rows up to the anchor from features, deeper rows from the drafter's own output."""
    torch.manual_seed(0)
    config = Eagle3Config(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64, vocab_size=136, draft_vocab_size=40, num_taps=3,
    )  # fmt: skip
    model = Eagle3(config, torch.arange(40) * 3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 131, (1, 8))
    taps = torch.randn(1, 8, 3, 32)
    drafts = propose(model, tiny_target.embedding, taps, ids, torch.tensor([8]), k=STEPS)[0]
    for anchor in range(8 - STEPS - 1):
        hidden = model.fuse(taps)[:, : anchor + 1]
        embeds = tiny_target.embedding[ids[:, 1 : anchor + 2]]
        first = model.project(embeds, hidden, torch.arange(anchor + 1)[None])
        keys, values = first.key, first.value
        query, residual, position = first.query[:, -1:], hidden[:, -1:], anchor
        for depth in range(STEPS):
            scores = torch.einsum("bqhd,bkhd->bhqk", query, keys.repeat_interleave(2, dim=2)) * config.head_dim**-0.5
            attended = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values.repeat_interleave(2, dim=2))
            residual = model.finish(attended, residual)
            draft = model.to_target_ids(model.logits(residual[0, 0]).argmax(-1))
            assert int(draft) == int(drafts[anchor, depth])
            position += 1
            logged = ids[:, anchor + 2 + depth : anchor + 3 + depth]  # accepted, so the draft is the logged token
            step = model.project(tiny_target.embedding[logged], residual, torch.tensor([[position]]))
            keys, values = torch.cat([keys, step.key], 1), torch.cat([values, step.value], 1)
            query = step.query


def test_a_batch_without_supervision_gives_zero_loss_and_zero_gradients(tiny_target: Any, tiny_snapshot: Any) -> None:
    objective, documents = _objective(tiny_target, tiny_snapshot)
    masked = _batch(tiny_target, objective, documents[:2])
    masked = masked._replace(weight=torch.zeros_like(masked.weight))
    empty = collate([], [], objective.model.t2d, steps=STEPS, decay=0.8, device=torch.device("cpu"))
    for batch in (masked, empty):
        loss = objective(batch)
        assert float(loss.detach()) == 0.0
        assert all(not gradient.any() for gradient in _gradients(objective, loss).values())


def test_one_masked_part_leaves_the_other_parts_gradient_unchanged(tiny_target: Any, tiny_snapshot: Any) -> None:
    objective, documents = _objective(tiny_target, tiny_snapshot)
    alone = _batch(tiny_target, objective, documents[:2])
    both = _batch(tiny_target, objective, documents[:4])
    weight = both.weight.clone()
    weight[:, sum(alone.rows) :] = 0
    together = _gradients(objective, objective(both._replace(weight=weight)))
    for name, want in _gradients(objective, objective(alone)).items():
        torch.testing.assert_close(together[name], want, rtol=1e-4, atol=1e-6)


def test_bf16_products_stay_close_to_fp32(tiny_target: Any, tiny_snapshot: Any) -> None:
    objective, documents = _objective(tiny_target, tiny_snapshot)
    batch = _batch(tiny_target, objective, documents)
    exact = float(objective(batch).detach())
    objective.dtype = torch.bfloat16
    half = Objective(objective.model, tiny_target.embedding, objective._frozen[1], steps=STEPS, dtype=torch.bfloat16)
    assert abs(float(half(batch).detach()) / exact - 1) < 0.02


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ([[21, 22, 23], [0, 0, 0], [0, 0, 0], [0, 0, 0]], (4, 1)),  # three accepted and the bonus token
        ([[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]], (4, 4)),
        ([[21, 0, 23], [0, 0, 0], [23, 24, 0], [0, 0, 0]], (4, 2)),  # the last step is clipped at the end
    ],
)
def test_the_held_out_walk_counts_tokens_and_steps_after_prefill(
    drafts: list[list[int]], expected: tuple[int, int]
) -> None:
    document = Document("r", torch.tensor([10, 11, 20, 21, 22, 23, 24]), prompt_length=2, greedy=True)
    unused = [99, 99, 99]  # the first anchor proposes token 20, which prefill emits
    assert walk(torch.tensor([unused, *drafts]).T, document, 0) == expected


def test_a_first_drafter_begins_with_the_targets_head_norm_and_last_layer(tiny_target: Any) -> None:
    model = first_drafter(tiny_target, [[5, 6, 7]], TrainConfig(draft_vocab_size=40))
    last = tiny_target.model.model.layers[-1]
    assert torch.equal(model.lm_head.weight, tiny_target.head[model.draft_token_ids])
    assert torch.equal(model.norm.weight, tiny_target.model.model.norm.weight)
    assert torch.equal(model.layer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(model.layer.self_attn.v_proj.weight[:, 32:], last.self_attn.v_proj.weight)
    assert torch.equal(model.layer.hidden_norm.weight, last.input_layernorm.weight)
    assert torch.equal(model.layer.post_attention_layernorm.weight, last.post_attention_layernorm.weight)
    again = first_drafter(tiny_target, [[5, 6, 7]], TrainConfig(draft_vocab_size=40))
    assert torch.equal(model.fc.weight, again.fc.weight)  # the seed decides, not what ran before

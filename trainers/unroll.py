"""The EAGLE-3 unroll: every anchor's chain of proposals at once, teacher-forced with the logged tokens.

Row i of depth t pairs the hidden state of the step before (t = 0: the target's fused features of token i) with the
embedding of token i+1+t, sits at rotary position i+t and proposes token i+2+t. It attends to the depth-0 rows j <= i
and, of every depth 1..t, to row i alone: what serving's cache holds when all drafts so far were accepted.
Shapes: B sequences, T positions, N taps, H hidden, Q query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.kernels.rows import rms_normalize, rotate, swiglu
from draftloop.kernels.ttt_attention import ttt_attention, ttt_attention_rows
from draftloop.trainers.batches import Batch
from draftloop.trainers.blocks import rotary
from draftloop.trainers.eagle3 import Eagle3, Eagle3Config


def _shifted(input_ids: Tensor, by: int) -> Tensor:
    """Token i+by at column i; the tail repeats token 0 and is never used."""
    return F.pad(input_ids, (0, by))[:, by:]


@torch.no_grad()
def propose(model: Eagle3, embedding: Tensor, taps: Tensor, input_ids: Tensor, lengths: Tensor, *, k: int) -> Tensor:
    """Greedy drafts from every anchor: entry [b, i, d] is the draft for token i+2+d given logged tokens up to i+1+d.

    embedding [V, H]; taps [B, T, N, H]; input_ids int64 [B, T], right-padded; lengths int64 [B]. Returns target ids,
    int64 [B, T, k]. Rows whose inputs lie beyond the length are don't-care.
    """
    del lengths  # causal and right-padded: padding is never attended to from inside
    dtype = model.fc.weight.dtype
    batch, length = input_ids.shape
    base = torch.arange(length, device=input_ids.device).expand(batch, length)
    hidden = model.fuse(taps)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    drafts = torch.empty(batch, length, k, dtype=torch.int64, device=input_ids.device)
    for depth in range(k):
        embeds = F.embedding(_shifted(input_ids, 1 + depth), embedding).to(dtype)
        projected = model.project(embeds, hidden, base + depth)
        keys.append(projected.key)
        values.append(projected.value)
        hidden = model.finish(ttt_attention(projected.query, keys, values), projected.residual)
        for sequence in range(batch):  # one sequence's logits at a time: [T, draft vocabulary], never [B, T, ...]
            drafts[sequence, :, depth] = model.to_target_ids(model.logits(hidden[sequence]).argmax(-1))
    return drafts


def unroll_rows(model: Eagle3, embedding: Tensor, batch: Batch, *, steps: int, dtype: torch.dtype) -> Tensor:
    """The same forward where it is trained: packed documents, and only anchors go deeper than depth 0.

    Norm weights are folded into the products that follow, q, k and v are one product, and the embedding's half of it
    is computed once: depth t's token of row i is depth 0's of row i+t. Returns the outputs a of all depths before the
    final norm, [steps, R, H] in `dtype`, that of the matrix products.
    """
    config, weights = model.config, folded_weights(model, dtype)
    eps = config.rms_norm_eps
    fused = F.linear(batch.taps.flatten(1).to(dtype), weights.fc)
    from_embeds = F.linear(rms_normalize(F.embedding(batch.next_ids, embedding).to(dtype), eps), weights.embeds)
    projected = from_embeds + F.linear(rms_normalize(fused, eps), weights.hidden)
    query, key, value = _heads(projected, batch.positions, config)
    query = query.index_select(0, batch.anchors)
    keys, values = [key], [value]
    hidden = fused.index_select(0, batch.anchors)
    from_embeds = from_embeds.index_select(0, batch.anchors) if steps > 1 else from_embeds
    outputs: list[Tensor] = []
    for depth in range(steps):
        if depth:
            # The last `depth` anchors of each document get rows of the next one: they propose beyond the end and have
            # weight 0, and nothing else attends to them.
            projected = from_embeds.roll(-depth, 0) + F.linear(rms_normalize(hidden, eps), weights.hidden)
            query, key, value = _heads(projected, batch.anchor_positions + depth, config)
            keys.append(key)
            values.append(value)
        attended = ttt_attention_rows(query, keys, values, batch.lengths, batch.rows)
        x = hidden + F.linear(attended.flatten(1), weights.output)
        hidden = x + F.linear(swiglu(F.linear(rms_normalize(x, eps), weights.gate_up)), weights.down)
        outputs.append(hidden)
    return torch.stack(outputs)


class FoldedWeights(NamedTuple):
    """The layer's matrices as the training form multiplies them; gradients flow back to the parameters."""

    fc: Tensor  # [H, N*H]
    embeds: Tensor  # [(Q+2K)*D, H] the embedding's columns of q, k, v times the input norm's weight
    hidden: Tensor  # [(Q+2K)*D, H] the hidden state's columns times the hidden norm's weight
    output: Tensor  # [H, Q*D]
    gate_up: Tensor  # [2I, H] times the post-attention norm's weight
    down: Tensor  # [H, I]


def folded_weights(model: Eagle3, dtype: torch.dtype) -> FoldedWeights:
    """Fold each norm's weight into the product that follows: matrix-sized work instead of one pass over all rows."""
    layer = model.layer
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    embeds, hidden = qkv.chunk(2, dim=1)
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    return FoldedWeights(
        fc=model.fc.weight.to(dtype),
        embeds=(embeds * layer.input_layernorm.weight).to(dtype),
        hidden=(hidden * layer.hidden_norm.weight).to(dtype),
        output=attention.o_proj.weight.to(dtype),
        gate_up=(gate_up * layer.post_attention_layernorm.weight).to(dtype),
        down=mlp.down_proj.weight.to(dtype),
    )


def _heads(projected: Tensor, positions: Tensor, config: Eagle3Config) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [R, Q, D], rotated keys and values [R, K, D] of one product [R, (Q+2K)*D]."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    heads = projected.unflatten(-1, (queries + 2 * keys, config.head_dim))
    cos, sin = rotary(positions, config.head_dim, config.rope_theta)
    rotated = rotate(heads[:, : queries + keys], cos, sin)
    return rotated[:, :queries], rotated[:, queries:], heads[:, queries + keys :]

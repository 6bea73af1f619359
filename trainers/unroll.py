"""The EAGLE-3 unroll: every anchor's chain of proposals at once, teacher-forced with the logged tokens.

Row i of depth t pairs the hidden state of the step before (t = 0: the target's fused features of token i) with the
embedding of token i+1+t, sits at rotary position i+t and proposes token i+2+t. It attends to the depth-0 rows j <= i
and, of every depth 1..t, to row i alone: what serving's cache holds when all drafts so far were accepted.
Shapes: B sequences, T positions, N taps, H hidden, Q query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.kernels.ttt_attention import ttt_attention, ttt_attention_rows
from draftloop.trainers.batches import Batch
from draftloop.trainers.eagle3 import Eagle3


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


def unroll_rows(model: Eagle3, embedding: Tensor, batch: Batch, *, steps: int) -> Tensor:
    """The same forward where it is trained: packed documents, and only anchors pay for more than keys and values.

    Returns the outputs a of all depths before the final norm, [steps, R, H].
    """
    dtype = model.fc.weight.dtype
    fused = model.fuse(batch.taps)
    normed = model.normed(F.embedding(batch.next_ids, embedding).to(dtype), fused)
    key, value = model.key_value(normed, batch.positions)
    keys, values = [key], [value]
    query = model.query(normed.index_select(0, batch.anchors), batch.anchor_positions)
    hidden = fused.index_select(0, batch.anchors)
    outputs: list[Tensor] = []
    for depth in range(steps):
        if depth:
            embeds = F.embedding(batch.deeper_ids[depth - 1], embedding).to(dtype)
            query, key, value = model.project(embeds, hidden, batch.anchor_positions + depth)[:3]
            keys.append(key)
            values.append(value)
        attended = ttt_attention_rows(query, keys, values, batch.lengths, batch.rows)
        hidden = model.finish(attended, hidden)
        outputs.append(hidden)
    return torch.stack(outputs)

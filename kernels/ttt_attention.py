"""Attention of EAGLE-3's unroll: causal over the depth-0 rows, plus the own row of every later depth.

Shapes: B sequences, T positions, Q query heads, K key/value heads (Q a multiple of K), D head size, R gathered rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def ttt_attention_reference(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """The plain form: all (1 + depth) * T keys side by side under one dense mask.

    query [B, T, Q, D] of the last depth; keys, values: one [B, T, K, D] per depth. Returns [B, T, Q, D].
    """
    length, groups = query.shape[1], query.shape[2] // keys[0].shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=query.device)
    mask = torch.cat([causal, *[own] * (len(keys) - 1)], dim=-1)
    key = torch.cat(list(keys), dim=1).repeat_interleave(groups, dim=2)
    value = torch.cat(list(values), dim=1).repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query.float(), key.float()) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value.float()).to(query.dtype)


def ttt_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """The same without the dense mask: causal scores of depth 0 and one column per later depth, softmaxed together.

    query [B, T, Q, D]; keys, values: one [B, T, K, D] per depth. Returns [B, T, Q, D].
    """
    if len(keys) == 1:
        return _causal(query, keys[0], values[0])
    batch, length, heads, size = query.shape
    groups = heads // keys[0].shape[2]
    scale = size**-0.5
    grouped = query.float().reshape(batch, length, heads // groups, groups, size)
    scores = torch.einsum("btkgd,bskd->bkgts", grouped, keys[0].float()) * scale
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~causal, float("-inf"))
    columns = [
        torch.einsum("btkgd,btkd->bkgt", grouped, key.float()).unsqueeze(-1) * scale for key in keys[1:]
    ]
    weights = torch.cat([scores, *columns], dim=-1).softmax(-1)
    out = torch.einsum("bkgts,bskd->btkgd", weights[..., :length], values[0].float())
    for index, value in enumerate(values[1:]):
        share = weights[..., length + index].permute(0, 3, 1, 2).unsqueeze(-1)  # [B, T, K, G, 1]
        out = out + share * value.float().unsqueeze(3)
    return out.reshape(batch, length, heads, size).to(query.dtype)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain causal attention, [B, T, heads, D] in and out."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)

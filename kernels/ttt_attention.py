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


def ttt_attention_rows(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int], rows: Sequence[int]
) -> Tensor:
    """The same for packed documents of which only the last rows ask: the training form.

    Document d has lengths[d] depth-0 keys and its last rows[d] positions are queries. query [R, Q, D] and the later
    depths' keys and values [R, K, D] hold those rows of all documents one after another, keys[0] and values[0] all
    positions [S, K, D]. Returns [R, Q, D]. Keys of other documents are never seen.
    """
    total, heads, size = query.shape
    groups = heads // keys[0].shape[1]
    kv_heads = heads // groups
    grouped = (query * size**-0.5).view(total, kv_heads, groups, size)
    columns = [(grouped * key.unsqueeze(2)).sum(-1).float() for key in keys[1:]]  # [R, K, G] each
    own = torch.stack(columns, dim=-1) if columns else None
    out: list[Tensor] = []
    own_parts = own.split(list(rows)) if own is not None else [None] * len(rows)
    own_weights: list[Tensor] = []
    parts = zip(
        grouped.split(list(rows)), keys[0].split(list(lengths)), values[0].split(list(lengths)), own_parts, strict=True
    )
    for q, k, v, own_scores in parts:
        count, length = q.shape[0], k.shape[0]
        scores = q.permute(1, 2, 0, 3).reshape(kv_heads, groups * count, size) @ k.permute(1, 2, 0)
        scores = scores.float().view(kv_heads, groups, count, length)
        hidden = torch.ones(count, length, dtype=torch.bool, device=q.device).triu(length - count + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        if own_scores is not None:
            scores = torch.cat([scores, own_scores.permute(1, 2, 0, 3)], dim=-1)
        weights = scores.softmax(-1).to(v.dtype)
        past = weights[..., :length].reshape(kv_heads, groups * count, length) @ v.transpose(0, 1)
        out.append(past.view(kv_heads, groups, count, size).permute(2, 0, 1, 3))
        own_weights.append(weights[..., length:].permute(2, 0, 1, 3))
    merged = torch.cat(out)
    if own is not None:
        shares = torch.cat(own_weights)
        for index, value in enumerate(values[1:]):
            merged = merged + shares[..., index : index + 1] * value.unsqueeze(2)
    return merged.reshape(total, heads, size)

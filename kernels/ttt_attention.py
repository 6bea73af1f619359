"""Attention of EAGLE-3's unroll: causal over the depth-0 rows, plus the own row of every later depth.

Shapes: B sequences, T positions, Q query heads, K key/value heads (Q a multiple of K), D head size, R gathered rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    columns = [torch.einsum("btkgd,btkd->bkgt", grouped, key.float()).unsqueeze(-1) * scale for key in keys[1:]]
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
    out: Tensor = _PackedAttention.apply(list(lengths), list(rows), len(keys) - 1, query, *keys, *values)
    return out


class _PackedAttention(torch.autograd.Function):
    """Probabilities are kept; backward is the softmax's own, one document at a time, own keys elementwise."""

    @staticmethod
    def forward(
        ctx: Any, lengths: list[int], rows: list[int], depth: int, query: Tensor, *key_values: Tensor
    ) -> Tensor:
        keys, values = key_values[: depth + 1], key_values[depth + 1 :]
        total, heads, size = query.shape
        kv_heads = keys[0].shape[1]
        groups = heads // kv_heads
        scale = size**-0.5
        grouped = query.view(total, kv_heads, groups, size)
        own = torch.stack([(grouped * key.unsqueeze(2)).sum(-1).float() for key in keys[1:]], -1) if depth else None
        out = torch.empty_like(query)
        kept: list[Tensor] = []
        start = first = 0
        for length, count in zip(lengths, rows, strict=True):
            q = _by_head(grouped[start : start + count])  # [K, G*r, D]
            k = keys[0][first : first + length].permute(1, 2, 0)
            v = values[0][first : first + length].transpose(0, 1)
            scores = torch.empty(kv_heads, groups, count, length + depth, dtype=torch.float32, device=query.device)
            scores[..., :length] = (q @ k).view(kv_heads, groups, count, length)
            if own is not None:
                scores[..., length:] = own[start : start + count].permute(1, 2, 0, 3)
            later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu_(1)
            scores[..., length - count : length].masked_fill_(later, float("-inf"))
            weights = scores.mul_(scale).softmax(-1).to(query.dtype)
            past = weights[..., :length].reshape(kv_heads, groups * count, length) @ v
            out[start : start + count] = _by_row(past, count).view(count, heads, size)
            kept.append(weights)
            start, first = start + count, first + length
        if depth:
            shares = torch.cat([weights[..., -depth:].permute(2, 0, 1, 3) for weights in kept])  # [R, K, G, depth]
            merged = out.view(total, kv_heads, groups, size)
            for index, value in enumerate(values[1:]):
                merged += shares[..., index : index + 1] * value.unsqueeze(2)
        ctx.save_for_backward(query, out, *key_values, *kept)
        ctx.layout = (lengths, rows, depth)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        lengths, rows, depth = ctx.layout
        query, out, *rest = ctx.saved_tensors
        keys, values, kept = rest[: depth + 1], rest[depth + 1 : 2 * depth + 2], rest[2 * depth + 2 :]
        grad = grad_outputs[0].contiguous()
        total, heads, size = query.shape
        kv_heads = keys[0].shape[1]
        groups = heads // kv_heads
        scale = size**-0.5
        grouped = query.view(total, kv_heads, groups, size)
        grad_grouped = grad.view(total, kv_heads, groups, size)
        delta = (grad * out).sum(-1, dtype=torch.float32).view(total, kv_heads, groups, 1)
        grad_query = torch.empty_like(grouped)
        grad_keys = [torch.empty_like(key) for key in keys]
        grad_values = [torch.empty_like(value) for value in values]
        start = first = 0
        for length, count, weights in zip(lengths, rows, kept, strict=True):
            here, there = slice(start, start + count), slice(first, first + length)
            past = weights[..., :length].reshape(kv_heads, groups * count, length)
            dout = _by_head(grad_grouped[here])
            dweights = dout @ values[0][there].permute(1, 2, 0)
            dscores = (dweights - _by_head(delta[here])).mul_(past).mul_(scale).to(query.dtype)
            grad_query[here] = _by_row(dscores @ keys[0][there].transpose(0, 1), count)
            grad_keys[0][there] = (dscores.transpose(1, 2) @ _by_head(grouped[here])).transpose(0, 1)
            grad_values[0][there] = (past.transpose(1, 2) @ dout).transpose(0, 1)
            start, first = start + count, first + length
        if depth:
            shares = torch.cat([weights[..., -depth:].permute(2, 0, 1, 3) for weights in kept])
            for index in range(depth):
                share = shares[..., index : index + 1]
                dweight = (grad_grouped * values[index + 1].unsqueeze(2)).sum(-1, keepdim=True, dtype=torch.float32)
                dscore = ((dweight - delta) * share * scale).to(query.dtype)
                grad_query += dscore * keys[index + 1].unsqueeze(2)
                grad_keys[index + 1] = (dscore * grouped).sum(2)
                grad_values[index + 1] = (share * grad_grouped).sum(2)
        return (None, None, None, grad_query.view_as(query), *grad_keys, *grad_values)


def _by_head(x: Tensor) -> Tensor:
    """[r, K, G, D] -> [K, G*r, D]."""
    count, kv_heads, groups, size = x.shape
    return x.permute(1, 2, 0, 3).reshape(kv_heads, groups * count, size)


def _by_row(x: Tensor, count: int) -> Tensor:
    """[K, G*r, D] -> [r, K, G, D]."""
    kv_heads, many, size = x.shape
    return x.view(kv_heads, many // count, count, size).permute(2, 0, 1, 3)

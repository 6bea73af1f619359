"""The target's forward over slots with their own lengths: one key/value store, written in place, read as a view.

The layers' own modules are called, in the model's order; only attention and the cache are ours, because the serving
loop needs ragged lengths without gathering, and taps without hooks.
Shapes: M sequences of this call, T new positions each, S visible positions, N taps, H hidden, Q query heads,
K key/value heads, G = Q / K, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.pipeline.errors import ConfigError
from draftloop.serving_hooks.embedded.packed import PackedLinears
from draftloop.trainers.target import Target

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


class Processed(NamedTuple):
    """What the target says about the new positions."""

    taps: Tensor  # [M, T, N, H]
    last: Tensor  # [M, T, H], after the final norm


class SlotCache:
    """Keys and values of one layer stack: [layers, slots, rows, K, D].

    Zeros at first: a hidden row has weight 0 in attention, and 0 times what was left in fresh memory may be NaN.
    """

    def __init__(self, num_layers: int, num_slots: int, num_rows: int, heads: tuple[int, int], like: Tensor) -> None:
        shape = (num_layers, num_slots, num_rows, *heads)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` rows of a slot over another one."""
        self.keys[:, destination, :length] = self.keys[:, source, :length]
        self.values[:, destination, :length] = self.values[:, source, :length]


class Span(NamedTuple):
    """Which contiguous slots a call covers, and what its rows see."""

    slots: slice
    positions: Tensor  # int64 [M, T]: position and cache row of each new token
    rows: Tensor  # int64 [M * T] flat cache rows (slot * num_rows + position)
    mask: Tensor  # [M, 1, G * T, S] additive, in the query's dtype
    visible: int  # S


def make_span(first_slot: int, starts: Tensor, width: int, num_rows: int, groups: int, dtype: torch.dtype) -> Span:
    """The span of M slots from first_slot on whose new rows start at `starts` int64 [M]; row t sees rows <= its own."""
    device, count = starts.device, starts.shape[0]
    positions = starts.unsqueeze(1) + torch.arange(width, device=device)
    slots = torch.arange(first_slot, first_slot + count, device=device)
    visible = int(positions.max()) + 1
    hidden = torch.arange(visible, device=device) > positions.unsqueeze(2)
    mask = torch.zeros(count, width, visible, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    mask = mask.unsqueeze(1).expand(-1, groups, -1, -1).reshape(count, 1, groups * width, visible)
    rows = (slots.unsqueeze(1) * num_rows + positions).flatten()
    return Span(slice(first_slot, first_slot + count), positions, rows, mask, visible)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Grouped attention without repeating keys: the G queries that share a head become rows of one.

    query [M, T, Q, D]; key, value [M, S, K, D]; mask [M, 1, G*T, S]. Returns [M, T, Q, D].
    """
    count, width, _, size = query.shape
    heads = key.shape[2]
    grouped = query.view(count, width, heads, -1, size).permute(0, 2, 3, 1, 4).reshape(count, heads, -1, size)
    out = F.scaled_dot_product_attention(grouped, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask)
    return out.view(count, heads, -1, width, size).permute(0, 3, 1, 2, 4).flatten(2, 3)


def write_rows(store: Tensor, rows: Tensor, new: Tensor) -> None:
    """Put new [M, T, K, D] at flat rows of one layer's store [slots, rows, K, D]."""
    store.view(-1, store.shape[2] * store.shape[3]).index_copy_(0, rows, new.reshape(rows.shape[0], -1))


class TargetRunner:
    """A target with slots. Raises ConfigError for an architecture whose attention this is not."""

    def __init__(self, target: Target, num_slots: int, num_rows: int, *, pack_weights: bool = False) -> None:
        config = target.model.config
        _check_supported(config)
        self.target = target
        self.num_rows = num_rows
        attention = target.model.model.layers[0].self_attn
        self._size: int = attention.head_dim
        self._heads: int = config.num_key_value_heads
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        self._tap_set = frozenset(target.fingerprint.tap_layers)
        self.dtype: torch.dtype = target.embedding.dtype
        self.device = target.embedding.device
        self._linear = PackedLinears(enabled=pack_weights)
        for layer in target.model.model.layers:
            for module in (*_projections(layer.self_attn), *_projections(layer.mlp)):
                self._linear.add(module)
        self._linear.add(target.model.get_output_embeddings())
        heads = (self._heads, self._size)
        self.cache = SlotCache(config.num_hidden_layers, num_slots, num_rows, heads, target.embedding)

    def forward(self, ids: Tensor, first_slot: int, starts: Tensor) -> Processed:
        """Process ids int64 [M, T] in slots first_slot.. at positions starts[m]..; writes their keys and values.

        Rows beyond a sequence's own tokens may hold anything: they are overwritten before they are seen.
        """
        span = make_span(first_slot, starts, ids.shape[1], self.num_rows, self.groups, self.dtype)
        body: Any = self.target.model.model
        x: Tensor = body.embed_tokens(ids)
        cos, sin = body.rotary_emb(x, span.positions)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        taps = []
        for index, layer in enumerate(body.layers):
            if index in self._tap_set:
                taps.append(x)
            x = x + self._attention(layer.self_attn, index, layer.input_layernorm(x), (cos, sin), span)
            x = x + self._mlp(layer.mlp, layer.post_attention_layernorm(x))
        return Processed(torch.stack(taps, dim=2), body.norm(x))

    def logits(self, last: Tensor) -> Tensor:
        """Next-token logits of last [..., H] -> [..., V]."""
        return self._linear(self.target.model.get_output_embeddings(), last)

    def _mlp(self, module: Any, x: Tensor) -> Tensor:
        linear = self._linear
        gate: Tensor = module.act_fn(linear(module.gate_proj, x))
        return linear(module.down_proj, gate * linear(module.up_proj, x))

    def _attention(self, module: Any, index: int, x: Tensor, rotation: tuple[Tensor, Tensor], span: Span) -> Tensor:
        shape = (*x.shape[:2], -1, self._size)
        linear = self._linear
        query, key = linear(module.q_proj, x).view(shape), linear(module.k_proj, x).view(shape)
        value = linear(module.v_proj, x).view(shape)
        if hasattr(module, "q_norm"):  # Qwen3: one norm a head
            query, key = module.q_norm(query), module.k_norm(key)
        query, key = _rotate(query, *rotation), _rotate(key, *rotation)
        keys, values = self.cache.keys[index], self.cache.values[index]
        write_rows(keys, span.rows, key)
        write_rows(values, span.rows, value)
        seen = attend(query, keys[span.slots, : span.visible], values[span.slots, : span.visible], span.mask)
        return linear(module.o_proj, seen.flatten(2))


def _projections(module: Any) -> list[nn.Module]:
    return [child for child in module.children() if isinstance(child, nn.Linear)]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def _check_supported(config: Any) -> None:
    if config.model_type not in SUPPORTED:
        raise ConfigError(
            f"target architecture {config.model_type!r} in the embedded engine",
            mend=f"use one of {', '.join(SUPPORTED)}, or serve this target with vLLM or SGLang",
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = config.model_type == "mistral" and getattr(config, "sliding_window", None) is not None
    if kinds != {"full_attention"} or windowed:
        raise ConfigError(
            f"target {config.model_type!r} with sliding-window attention in the embedded engine",
            mend="switch sliding_window off in its config.json, or serve this target with vLLM or SGLang",
        )

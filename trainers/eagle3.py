"""EAGLE-3 drafter (arXiv 2503.01840): one Llama-type layer over fused target features and the next token's embedding.

Position i pairs the features of token i with the embedding of token i+1 and proposes token i+2.
Shapes: B sequences, T positions, H hidden, Q query heads, K key/value heads, D head size.
The caller owns keys and values (training keeps one diagonal per unrolled step, the engine a cache), so the layer is
offered in two halves around attention: `project` and `finish`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from draftloop.trainers.blocks import GatedMLP, RMSNorm, apply_rotary, rotary


class Eagle3Config(BaseModel):
    """Shapes of one EAGLE-3 drafter; fixed for as long as an engine runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int  # rows of the target's embedding
    draft_vocab_size: int
    num_taps: int


class Projected(NamedTuple):
    """What attention needs and what `finish` needs back."""

    query: Tensor  # [B, T, Q, D], rotated
    key: Tensor  # [B, T, K, D], rotated
    value: Tensor  # [B, T, K, D]
    residual: Tensor  # [B, T, H]


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)


class Eagle3(nn.Module):
    """The drafter. Parameter names are those of the published formats; the embedding stays the target's own."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, draft_token_ids: Tensor) -> None:
        """draft_token_ids: strictly increasing target ids of the draft vocabulary, int64 [draft_vocab_size]."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[draft_token_ids] = True
        self.register_buffer("d2t", draft_token_ids - torch.arange(config.draft_vocab_size))
        self.register_buffer("t2d", t2d)

    @property
    def layer(self) -> _Layer:
        """The only decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        return layer

    def fuse(self, taps: Tensor) -> Tensor:
        """Target features [..., taps, H] to the first step's hidden input g [..., H]."""
        return self.fc(taps.flatten(-2).to(self.fc.weight.dtype))

    def normed(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input [..., 2H]. embeds: e(x_{i+1}); hidden: g_i or the previous step's output."""
        layer = self.layer
        return torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)

    def query(self, normed: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [..., Q, D] of normed rows [..., 2H]."""
        layer, config = self.layer, self.config
        query = layer.self_attn.q_proj(normed).unflatten(-1, (config.num_attention_heads, config.head_dim))
        return apply_rotary(query, *rotary(positions, config.head_dim, config.rope_theta))

    def key_value(self, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, [..., K, D] each, of normed rows [..., 2H]."""
        layer, config = self.layer, self.config
        key = layer.self_attn.k_proj(normed).unflatten(-1, (config.num_key_value_heads, config.head_dim))
        value = layer.self_attn.v_proj(normed).unflatten(-1, (config.num_key_value_heads, config.head_dim))
        return apply_rotary(key, *rotary(positions, config.head_dim, config.rope_theta)), value

    def project(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Projected:
        """First half of the layer. embeds: e(x_{i+1}); hidden: g_i or the previous step's output; positions [B, T]."""
        normed = self.normed(embeds, hidden)
        key, value = self.key_value(normed, positions)
        return Projected(self.query(normed, positions), key, value, hidden)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Second half. attended [B, T, Q, D] -> output a [B, T, H], before the final norm."""
        layer = self.layer
        x = residual + layer.self_attn.o_proj(attended.flatten(-2))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, output: Tensor) -> Tensor:
        """Draft-vocabulary logits of an output a [..., H] -> [..., draft_vocab_size]."""
        return self.lm_head(self.norm(output))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary indices to the target's token ids."""
        return draft_ids + self.d2t[draft_ids]

    @property
    def draft_token_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, ascending, int64 [draft_vocab_size]."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

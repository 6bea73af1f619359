"""DFlash drafters with random weights in the speculators format, for a tiny target: what vLLM loads and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftloop.pipeline import artifact
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.serving_hooks.vllm.proof import tensor_digest

BLOCK = 8
DRAFT_VOCABULARY = 512
LAYERS, HEADS, HEAD_DIM, MIDDLE = 2, 2, 32, 128  # vLLM's attention on CPUs knows no head smaller than 32
MASK = 3  # token id


def publish_dflash(folder: Path, fingerprint: Fingerprint, *, seed: int) -> str:
    """Write a sealed drafter folder; return its digest."""
    tensors = _tensors(fingerprint, torch.Generator().manual_seed(seed))
    manifest = {"family": "dflash", "fingerprint": fingerprint.to_dict(), "tensor_digest": tensor_digest(tensors)}
    with artifact.staging(folder) as draft:
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        (draft / "config.json").write_text(json.dumps(_config(fingerprint)))
        artifact.publish(draft, folder, manifest)
    return (folder / artifact.MARKER).read_text()


def _tensors(fingerprint: Fingerprint, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, inner = fingerprint.hidden_size, HEADS * HEAD_DIM

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.2).bfloat16()

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).bfloat16()

    first = int(torch.randint(1000, 2000, (), generator=generator))
    used = torch.zeros(fingerprint.padded_vocab_size, dtype=torch.bool)
    used[first : first + DRAFT_VOCABULARY] = True
    tensors = {
        "fc.weight": random(hidden, len(fingerprint.tap_layers) * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
        "lm_head.weight": random(DRAFT_VOCABULARY, hidden),
        "d2t": torch.full((DRAFT_VOCABULARY,), first),
        "t2d": used,
    }
    for layer in range(LAYERS):
        weights = {
            "input_layernorm": norm(hidden),
            "post_attention_layernorm": norm(hidden),
            "self_attn.q_proj": random(inner, hidden),
            "self_attn.k_proj": random(inner, hidden),
            "self_attn.v_proj": random(inner, hidden),
            "self_attn.o_proj": random(hidden, inner),
            "self_attn.q_norm": norm(HEAD_DIM),
            "self_attn.k_norm": norm(HEAD_DIM),
            "mlp.gate_proj": random(MIDDLE, hidden),
            "mlp.up_proj": random(MIDDLE, hidden),
            "mlp.down_proj": random(hidden, MIDDLE),
        }
        tensors |= {f"layers.{layer}.{name}.weight": value for name, value in weights.items()}
    return tensors


def _config(fingerprint: Fingerprint) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "aux_hidden_state_layer_ids": list(fingerprint.tap_layers),
        "mask_token_id": MASK,
        "block_size": BLOCK,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # vLLM 0.32 takes False for causal attention in all layers
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": fingerprint.padded_vocab_size,
            "hidden_size": fingerprint.hidden_size,
            "intermediate_size": MIDDLE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": fingerprint.max_position_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": fingerprint.rope_theta},
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
    }

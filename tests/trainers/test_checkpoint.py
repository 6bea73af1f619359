"""Drafter folders: the format engines read, whole or not there, and nothing they propose is lost on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from draftloop.pipeline.errors import CheckpointError, FingerprintMismatchError
from draftloop.trainers.checkpoint import open_drafter, publish_drafter, tensor_digest, vocabulary_digest
from draftloop.trainers.config import TrainConfig
from draftloop.trainers.eagle3 import Eagle3
from draftloop.trainers.start import eagle3_config, first_drafter


@pytest.fixture
def model(tiny_target: Any) -> Eagle3:
    """64 of 131 tokens, target id 120 among them."""
    torch.manual_seed(0)
    tokens = torch.tensor(sorted({*range(0, 126, 2), 119}))[:64]
    return Eagle3(eagle3_config(tiny_target, 64), tokens)


def _publish(tiny: Any, model: Eagle3, folder: Path, **training: Any) -> str:
    return publish_drafter(
        folder, model, fingerprint=tiny.fingerprint, snapshot_id="s", parents=["p"], training=training
    )


def test_config_json_is_the_speculators_eagle3_form(tiny_target: Any, model: Eagle3, tmp_path: Path) -> None:
    _publish(tiny_target, model, tmp_path / "d", target="org/tiny", num_speculative_tokens=3)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert "model_type" not in config  # its presence at top level would select another dialect
    assert config == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 64,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "org/tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": 136,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
    }


def test_the_weights_file_holds_exactly_the_published_tensors(tiny_target: Any, model: Eagle3, tmp_path: Path) -> None:
    _publish(tiny_target, model, tmp_path / "d")
    with safe_open(tmp_path / "d" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    found = {
        name: (str(tensor.dtype), list(tensor.shape))
        for name, tensor in load_file(tmp_path / "d" / "model.safetensors").items()
    }
    bf16 = {
        "fc.weight": [32, 96],
        "layers.0.input_layernorm.weight": [32],
        "layers.0.hidden_norm.weight": [32],
        "layers.0.post_attention_layernorm.weight": [32],
        "layers.0.self_attn.q_proj.weight": [32, 64],
        "layers.0.self_attn.k_proj.weight": [16, 64],
        "layers.0.self_attn.v_proj.weight": [16, 64],
        "layers.0.self_attn.o_proj.weight": [32, 32],
        "layers.0.mlp.gate_proj.weight": [64, 32],
        "layers.0.mlp.up_proj.weight": [64, 32],
        "layers.0.mlp.down_proj.weight": [32, 64],
        "norm.weight": [32],
        "lm_head.weight": [64, 32],
    }
    expected = {name: ("torch.bfloat16", shape) for name, shape in bf16.items()}
    assert found == {**expected, "d2t": ("torch.int64", [64]), "t2d": ("torch.bool", [136])}


def test_an_exported_drafter_proposes_target_id_120_again(tiny_target: Any, model: Eagle3, tmp_path: Path) -> None:
    """Read back from the folder alone: the map travels with the weights."""
    index = model.draft_token_ids.tolist().index(120)
    state = torch.randn(32)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[index] = model.norm(state)
    _publish(tiny_target, model, tmp_path / "d")
    reopened = open_drafter(tmp_path / "d", fingerprint=tiny_target.fingerprint).model
    assert int(reopened.to_target_ids(reopened.logits(state).argmax())) == 120
    assert reopened.d2t[index] == 120 - index
    assert reopened.t2d.nonzero().squeeze(-1).tolist() == model.draft_token_ids.tolist()


def test_one_digest_whatever_dtype_a_drafter_is_opened_in(tiny_target: Any, model: Eagle3, tmp_path: Path) -> None:
    digest = _publish(tiny_target, model, tmp_path / "d")
    wide = open_drafter(tmp_path / "d", fingerprint=None)
    half = open_drafter(tmp_path / "d", fingerprint=None, dtype=torch.bfloat16)
    assert digest == wide.digest == half.digest == (tmp_path / "d" / "COMPLETE").read_text()
    assert tensor_digest(wide.model) == tensor_digest(half.model) == wide.manifest.tensor_digest == tensor_digest(model)
    assert wide.manifest.vocabulary_digest == vocabulary_digest(model)
    assert not any(parameter.requires_grad for parameter in wide.model.parameters())
    assert (wide.manifest.snapshot_id, wide.manifest.parents) == ("s", ["p"])


def test_a_drafter_of_another_target_is_refused_by_field(tiny_target: Any, model: Eagle3, tmp_path: Path) -> None:
    _publish(tiny_target, model, tmp_path / "d")
    other = replace(tiny_target.fingerprint, tap_layers=(0, 1, 2))
    with pytest.raises(FingerprintMismatchError, match=r"tap_layers: target has \(0, 1, 2\)"):
        open_drafter(tmp_path / "d", fingerprint=other)


def test_altered_weights_and_a_missing_marker_are_refused(tiny_target: Any, model: Eagle3, tmp_path: Path) -> None:
    _publish(tiny_target, model, tmp_path / "d")
    weights = tmp_path / "d" / "model.safetensors"
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was altered"):
        open_drafter(tmp_path / "d", fingerprint=None)
    (tmp_path / "d" / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="no COMPLETE marker"):
        open_drafter(tmp_path / "d", fingerprint=None)


def test_weights_that_are_not_finite_are_not_published(tiny_target: Any, model: Eagle3, tmp_path: Path) -> None:
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"fc\.weight holds NaN"):
        _publish(tiny_target, model, tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_another_drafter_at_the_same_place_is_refused_and_an_equal_one_is_fine(
    tiny_target: Any, model: Eagle3, tmp_path: Path
) -> None:
    digest = _publish(tiny_target, model, tmp_path / "d")
    assert _publish(tiny_target, model, tmp_path / "d") == digest
    with torch.no_grad():
        model.fc.weight.add_(1)
    with pytest.raises(CheckpointError, match="already holds another drafter"):
        _publish(tiny_target, model, tmp_path / "d")


def test_a_tied_target_gives_an_untied_head_of_the_draft_size(tiny_target: Any, tmp_path: Path) -> None:
    assert tiny_target.model.config.tie_word_embeddings
    outputs = [[5, 6, 7]]
    model = first_drafter(tiny_target, outputs, TrainConfig(draft_vocab_size=64))
    torch.testing.assert_close(model.lm_head.weight, tiny_target.head[model.draft_token_ids])
    _publish(tiny_target, model, tmp_path / "d")
    reopened = open_drafter(tmp_path / "d", fingerprint=tiny_target.fingerprint).model
    assert reopened.lm_head.weight.shape == (64, 32)
    assert reopened.lm_head.weight.data_ptr() != tiny_target.embedding.data_ptr()

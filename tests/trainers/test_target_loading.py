"""Folders that are no target: each is named with its mend instead of being half used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from draftloop.pipeline.errors import CheckpointError, ConfigError, ModelNotFoundError, StorageError  # noqa: E402
from draftloop.trainers import features  # noqa: E402
from draftloop.trainers.checkpoint import open_drafter  # noqa: E402
from draftloop.trainers.target import Target  # noqa: E402


@pytest.fixture
def saved(tiny_target: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    tiny_target.model.save_pretrained(folder)
    tiny_target.tokenizer.save_pretrained(folder)
    return folder


def test_a_saved_target_loads_with_the_same_fingerprint(saved: Path, tiny_target: Any) -> None:
    assert Target.load(saved, dtype="float32").fingerprint == tiny_target.fingerprint


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        Target.load("/no-such-model")


def test_truncated_weights_are_named(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelNotFoundError, match="target"):
        Target.load(saved, dtype="float32")


def test_absent_tensors_are_refused_instead_of_filled_with_random_numbers(saved: Path) -> None:
    weights = saved / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"lacks 1 of its tensors, model\.layers\.2\.mlp\.up_proj\.weight"):
        Target.load(saved, dtype="float32")


def test_a_model_of_another_kind_is_refused_by_type(tiny_target: Any, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=136, n_positions=64, n_embd=16, n_layer=3, n_head=2)).save_pretrained(folder)
    tiny_target.tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="gpt2"):
        Target.load(folder, dtype="float32")


def test_a_drafter_whose_weights_are_no_safetensors_is_a_checkpoint_error(tmp_path: Path) -> None:
    from draftloop.pipeline.artifact import publish, staging

    good = tmp_path / "good"
    _publish_tiny(good)
    manifest = json.loads((good / "manifest.json").read_bytes())
    del manifest["files"]
    with staging(tmp_path / "bad") as draft:
        shutil.copy(good / "config.json", draft)
        (draft / "model.safetensors").write_bytes(b"not safetensors at all")
        publish(draft, tmp_path / "bad", manifest)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        open_drafter(tmp_path / "bad", fingerprint=None)


def _publish_tiny(folder: Path) -> None:
    from draftloop.pipeline.fingerprint import Fingerprint
    from draftloop.trainers.checkpoint import publish_drafter
    from draftloop.trainers.eagle3 import Eagle3, Eagle3Config

    config = Eagle3Config(
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=64,
        vocab_size=16,
        draft_vocab_size=8,
        num_taps=3,
    )
    fingerprint = Fingerprint(
        weights_digest="w",
        tokenizer_digest="t",
        template_digest="c",
        vocab_size=16,
        padded_vocab_size=16,
        hidden_size=8,
        num_layers=4,
        tap_layers=(1, 2, 3),
        dtype="float32",
        quantization="none",
        max_position_embeddings=64,
        rope_theta=1e4,
    )
    model = Eagle3(config, torch.arange(8))
    publish_drafter(folder, model, fingerprint=fingerprint, snapshot_id=None, parents=[], training={})


def test_features_that_do_not_fit_on_the_disk_are_a_storage_error_and_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "features.bin"
    with pytest.raises(StorageError, match="no room for"):
        features._reserve(path, 1 << 60)
    assert not path.exists()

"""Drafter folders: the `speculators` EAGLE-3 format, our manifest beside it, no pickle anywhere.

config.json         what vLLM reads (no top-level model_type: its presence would select another dialect)
model.safetensors   bf16 weights, d2t int64 (target id - draft index), t2d bool; no embedding: it is the target's own
manifest.json       family, shapes, vocabulary digest, fingerprint, parents, snapshot id, training facts
COMPLETE            sha256 of the manifest: the digest of the whole folder
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftloop.pipeline.artifact import MARKER, publish, staging, verify
from draftloop.pipeline.errors import CheckpointError
from draftloop.pipeline.fingerprint import Fingerprint, require_same
from draftloop.trainers.eagle3 import Eagle3, Eagle3Config

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_MEND = "train the drafter again or restore the folder from a copy"


class DrafterManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines' config does not say: where a drafter comes from and which target it belongs to."""

    family: str
    fingerprint: dict[str, Any]
    shapes: dict[str, Any]  # Eagle3Config
    vocabulary_digest: str  # of d2t; a warm start keeps its parent's
    tensor_digest: str  # of the weights as saved (bf16)
    snapshot_id: str | None
    parents: list[str]  # digests, nearest first
    training: dict[str, Any]
    files: dict[str, str] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Drafter:
    """An opened drafter folder."""

    model: Eagle3
    manifest: DrafterManifest
    digest: str
    folder: Path


def tensor_digest(model: Eagle3) -> str:
    """sha256 over names, shapes and bytes of parameters and d2t, in name order.

    Weights count in the bf16 they are saved in, so a drafter has one digest whatever dtype it was opened in.
    """
    return _digest({name: value for name, value in _saved_tensors(model).items() if name != "t2d"})


def vocabulary_digest(model: Eagle3) -> str:
    """sha256 of the draft vocabulary map."""
    return _digest({"d2t": model.d2t})


def publish_drafter(
    final: Path,
    model: Eagle3,
    *,
    fingerprint: Fingerprint,
    snapshot_id: str | None,
    parents: list[str],
    training: dict[str, Any],
) -> str:
    """Write a drafter folder, whole or not at all; return its digest. An equal complete folder already there stays.

    `training` may hold "target" (name for engines), "num_speculative_tokens" and "target_architecture"; all of it goes
    into the manifest. Raises CheckpointError for weights that are not finite or another drafter at `final`,
    StorageError for a full disk.
    """
    tensors = _saved_tensors(model)
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(f"drafter tensor {name} holds NaN or infinity: not published", mend=_MEND)
    manifest = DrafterManifest(
        family="eagle3",
        fingerprint=fingerprint.to_dict(),
        shapes=model.config.model_dump(),
        vocabulary_digest=vocabulary_digest(model),
        tensor_digest=_digest({name: value for name, value in tensors.items() if name != "t2d"}),
        snapshot_id=snapshot_id,
        parents=parents,
        training=training,
    )
    with staging(final) as draft:
        save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})
        (draft / CONFIG).write_text(json.dumps(speculators_config(model.config, fingerprint, training), indent=2))
        sealed = publish(draft, final, msgspec.to_builtins(manifest))
    found = verify(final, kind="drafter", error=CheckpointError)
    if found != sealed:
        raise CheckpointError(f"{final} already holds another drafter", mend="choose another output folder")
    return (final / MARKER).read_text().strip()


def open_drafter(folder: Path, *, fingerprint: Fingerprint | None, dtype: torch.dtype = torch.float32) -> Drafter:
    """Verify and load a drafter folder; eval mode, no gradients.

    fingerprint: the target it must belong to, None to skip that. Raises CheckpointError (incomplete, altered, other
    shape), FingerprintMismatchError.
    """
    raw = verify(folder, kind="drafter", error=CheckpointError)
    try:
        manifest = msgspec.convert(raw, DrafterManifest)
        own = Fingerprint.from_dict(manifest.fingerprint)
        config = Eagle3Config.model_validate(manifest.shapes)
    except ValueError as error:  # msgspec's and pydantic's validation errors are both ValueErrors
        raise CheckpointError(f"drafter {folder}: manifest.json is of another form: {error}", mend=_MEND) from error
    if fingerprint is not None:
        require_same(fingerprint, own, expected_of="target", found_of=f"drafter {folder}")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"drafter {folder}: {WEIGHTS} cannot be read: {error}", mend=_MEND) from error
    if "d2t" not in tensors:
        raise CheckpointError(f"drafter {folder} has a reduced vocabulary but no d2t map", mend=_MEND)
    draft_ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    model = Eagle3(config, draft_ids).to(dtype)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"drafter {folder}: {WEIGHTS} does not fit its shapes: {error}", mend=_MEND) from error
    model.eval().requires_grad_(False)
    return Drafter(model, manifest, (folder / MARKER).read_text().strip(), folder)


def speculators_config(config: Eagle3Config, fingerprint: Fingerprint, training: dict[str, Any]) -> dict[str, Any]:
    """config.json in the speculators EAGLE-3 form. Layer ids count hidden states entering a layer, as vLLM does."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": False,  # vLLM takes an absent key for True, SGLang cannot do True
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(fingerprint.tap_layers),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": int(training.get("num_speculative_tokens", 4)),
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": str(training.get("target", fingerprint.digest)),
                "architectures": [str(training.get("target_architecture", "LlamaForCausalLM"))],
            },
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.rms_norm_eps,
            "max_position_embeddings": config.max_position_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
    }


def _saved_tensors(model: Eagle3) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
        # A clone: safetensors refuses storage that is shared, as a head sliced from the target may be.
        tensors[name] = value.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
    return tensors


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""The frozen target: loaded once, never changed; its features, embedding, head and identity.

Shapes: B sequences, T positions, N tap layers, H hidden, V rows of the head.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from draftloop.pipeline.errors import ConfigError, ModelNotFoundError
from draftloop.pipeline.fingerprint import Fingerprint, tokenizer_digest
from draftloop.trainers.layer_ids import check_tap_layers, default_tap_layers

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Features(NamedTuple):
    """What a drafter learns from. Row t belongs to token t."""

    taps: Tensor  # [B, T, N, H] hidden states entering the tap layers
    last: Tensor  # [B, T, H] after the final norm: head(last) are the target's logits for token t+1


class Prefix(NamedTuple):
    """The common beginning of many sequences, run once."""

    features: Features
    cache: Any  # transformers' keys and values


class Target:
    """A causal LM with its tokenizer and fingerprint, in eval mode without gradients."""

    def __init__(self, model: Any, tokenizer: Any, fingerprint: Fingerprint, folder: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.folder = folder  # the path or hub id it came from

    @classmethod
    def load(
        cls, path_or_id: str | Path, *, dtype: str = "bfloat16", tap_layers: tuple[int, ...] | None = None
    ) -> Target:
        """Load from a local folder or a hub id. Raises ModelNotFoundError, ConfigError (tap layers)."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        name = str(path_or_id)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model, found = AutoModelForCausalLM.from_pretrained(
                name, dtype=DTYPES[dtype], attn_implementation="sdpa", output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ModelNotFoundError(
                f"no target at {name!r}: {str(error).splitlines()[0]}",
                mend="give a folder with config.json, safetensors and a tokenizer, or a hub id within reach",
            ) from error
        absent = sorted(found["missing_keys"])
        if absent:  # they would be random numbers, silently
            raise ModelNotFoundError(
                f"target {name!r} lacks {len(absent)} of its tensors, {absent[0]} among them",
                mend="download or copy the model again",
            )
        return cls.of(model, tokenizer, folder=name, dtype=dtype, tap_layers=tap_layers)

    @classmethod
    def of(
        cls, model: Any, tokenizer: Any, *, folder: str, dtype: str, tap_layers: tuple[int, ...] | None = None
    ) -> Target:
        """Wrap a model that is already in memory. Raises ConfigError for one that is not of the Llama or Qwen kind."""
        if not hasattr(getattr(model, "model", None), "layers"):
            raise ConfigError(
                f"target {folder!r} is of type {model.config.model_type!r}",
                mend="drafters are trained for Llama- and Qwen-type causal language models",
            )
        model.eval().requires_grad_(False)
        num_layers = model.config.num_hidden_layers
        taps = check_tap_layers(tap_layers, num_layers) if tap_layers else default_tap_layers(num_layers)
        return cls(model, tokenizer, _fingerprint(model, tokenizer, dtype, taps), folder)

    @property
    def embedding(self) -> Tensor:
        """[V, H], the target's own storage."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """[V, H], the target's own storage."""
        output: nn.Module = self.model.get_output_embeddings()
        assert isinstance(output.weight, Tensor)
        return output.weight

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids at which this target stops."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.tokenizer.eos_token_id
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Features:
        """Features of right-padded sequences. input_ids, attention_mask: int64 [B, T]."""
        out = self.model.model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False
        )
        return self._taken(out)

    @torch.no_grad()
    def prefix(self, input_ids: Tensor) -> Prefix:
        """What sequences that begin with input_ids int64 [T] share: features [1, T, ...] and keys and values."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        return Prefix(self._features_with(cache, input_ids[None]), cache)

    @torch.no_grad()
    def features_after(self, prefix: Prefix, input_ids: Tensor) -> Features:
        """Features of the tokens that follow the prefix in right-padded sequences. input_ids: int64 [B, T]."""
        cache = copy.deepcopy(prefix.cache)
        cache.batch_repeat_interleave(input_ids.shape[0])
        return self._features_with(cache, input_ids)

    def _features_with(self, cache: Any, input_ids: Tensor) -> Features:
        # transformers renamed the argument within version 5.
        named = "cache" if "cache" in inspect.signature(self.model.model.forward).parameters else "past_key_values"
        out = self.model.model(input_ids=input_ids, output_hidden_states=True, use_cache=True, **{named: cache})
        return self._taken(out)

    def _taken(self, out: Any) -> Features:
        taps = torch.stack([out.hidden_states[tap] for tap in self.fingerprint.tap_layers], dim=2)
        return Features(taps, out.last_hidden_state)


def _fingerprint(model: Any, tokenizer: Any, dtype: str, tap_layers: tuple[int, ...]) -> Fingerprint:
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return Fingerprint(
        weights_digest=_weights_digest(model),
        tokenizer_digest=tokenizer_digest(tokenizer),
        template_digest=hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        vocab_size=len(tokenizer),
        padded_vocab_size=model.get_input_embeddings().weight.shape[0],
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        tap_layers=tap_layers,
        dtype=dtype,
        quantization="none",
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
    )


def _weights_digest(model: Any) -> str:
    """sha256 over names, shapes and bytes of all weights, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

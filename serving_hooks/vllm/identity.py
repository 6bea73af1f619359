"""Does this engine serve the target that the fingerprint file names? What it says of itself is compared at its start.

The digest of its weights needs their files to be read, so that is checked in the background.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftloop.pipeline.errors import CheckpointError, FingerprintMismatchError
from draftloop.pipeline.fingerprint import Fingerprint, require_same, tokenizer_digest
from draftloop.serving_hooks.vllm import checks

_TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_PIECE = 4 * 2**20  # bytes
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_log = logging.getLogger("vllm.draftloop")  # only what is below its name does vLLM show


def require_target(expected: Fingerprint, config: Any, tokenizer: Any, chat_template: str | None) -> None:
    """Raise FingerprintMismatchError naming what differs. config: vLLM's of the whole engine; chat_template: as the
    server was told by its flag, a file or the template itself, None for the tokenizer's own.
    """
    require_same(
        expected,
        replace(expected, **dict(_said(config, tokenizer, chat_template))),
        expected_of="the fingerprint file",
        found_of="this engine",
    )


def _said(config: Any, tokenizer: Any, chat_template: str | None) -> Iterator[tuple[str, Any]]:
    model = config.model_config
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or {}
    yield "padded_vocab_size", int(text.vocab_size)
    yield "hidden_size", int(text.hidden_size)
    yield "num_layers", int(text.num_hidden_layers)
    yield "dtype", str(model.dtype).removeprefix("torch.")
    yield "quantization", str(model.quantization or "none")
    yield "max_position_embeddings", int(text.max_position_embeddings)
    yield "rope_theta", float(rope.get("rope_theta", getattr(text, "rope_theta", 10000.0)))
    if tokenizer is not None:
        yield "vocab_size", len(tokenizer)
        yield "tokenizer_digest", tokenizer_digest(tokenizer)
        yield "template_digest", hashlib.sha256(_template(tokenizer, chat_template).encode()).hexdigest()
    taps = _taps(config.speculative_config)
    if taps is not None:
        yield "tap_layers", taps


def _template(tokenizer: Any, told: str | None) -> str:
    if told is None:
        return str(tokenizer.chat_template)
    try:
        return Path(told).read_text()
    except (OSError, ValueError):  # too long for a path, or none: the template itself
        return told


def _taps(speculation: Any) -> tuple[int, ...] | None:
    draft = getattr(speculation, "draft_model_config", None)
    config = getattr(draft, "hf_config", None)
    for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        layers = getattr(config, name, None)
        if layers:
            return tuple(int(layer) for layer in layers)
    return None


def require_weights(expected: Fingerprint, folder: Path) -> None:
    """Read a target's files, all of them; raise FingerprintMismatchError if they are not the fingerprint's.

    Nothing is said where they cannot be compared: another dtype on disk, no safetensors. Raises CheckpointError for
    files that are damaged.
    """
    places = _places(folder)
    if not places or any(_TORCH.get(form.dtype) != expected.dtype for _, form, _ in places.values()):
        _log.info("draftloop: the weights of %s are not compared: not on disk in %s", folder, expected.dtype)
        return
    if _HEAD not in places and _EMBEDDING in places:  # tied: a model has it under both names
        places[_HEAD] = places[_EMBEDDING]
    began = time.monotonic()
    found = _weights_digest(places)
    if found != expected.weights_digest:
        raise FingerprintMismatchError(
            f"the weights in {folder} have digest {found}, the fingerprint file names {expected.weights_digest}",
            mend="write the fingerprint of this target with `draftloop fingerprint --out FILE`",
        )
    _log.info("draftloop: the target's weights are the fingerprint's (%.1f s)", time.monotonic() - began)


_Place = tuple[Path, checks.TensorForm, int]


def _places(folder: Path) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for path in sorted(folder.glob("*.safetensors")):
        forms, start = checks.header(path)
        places.update({name: (path, form, start) for name, form in forms.items()})
    return places


def _weights_digest(places: dict[str, _Place]) -> str:
    digest = hashlib.sha256()
    for name, (path, form, start) in sorted(places.items()):
        digest.update(f"{name}{form.shape}torch.{_TORCH[form.dtype]}".encode())
        begin, end = form.data_offsets
        try:
            with path.open("rb") as stream:
                stream.seek(start + begin)
                left = end - begin
                while left and (piece := stream.read(min(left, _PIECE))):
                    digest.update(piece)
                    left -= len(piece)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}", mend="check the disk") from None
    return digest.hexdigest()

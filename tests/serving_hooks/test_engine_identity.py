"""Whether an engine serves the target that the fingerprint file names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_target import make_target

from draftloop.pipeline.errors import FingerprintMismatchError
from draftloop.serving_hooks.vllm.identity import require_target, require_weights
from draftloop.trainers.target import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("identity") / "target")


def engine(target: Target, **changes: Any) -> Any:
    """What vLLM knows of itself, of the parts that are asked for."""
    model = SimpleNamespace(hf_text_config=target.model.config, dtype="torch.float32", quantization=None)
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[1, 2, 3]))
    config = SimpleNamespace(model_config=model, speculative_config=SimpleNamespace(draft_model_config=draft))
    for name, value in changes.items():
        setattr(model, name, value)
    return config


def test_an_engine_of_this_target_is_its_fingerprint(target: Target) -> None:
    require_target(target.fingerprint, engine(target), target.tokenizer, None)


def test_a_template_given_by_flag_counts_as_text_and_as_file(target: Target, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(target.tokenizer.chat_template)
    require_target(target.fingerprint, engine(target), target.tokenizer, str(file))
    require_target(target.fingerprint, engine(target), target.tokenizer, target.tokenizer.chat_template)
    with pytest.raises(FingerprintMismatchError, match="template_digest"):
        require_target(target.fingerprint, engine(target), target.tokenizer, "{{ messages }}")


@pytest.mark.parametrize(("name", "value"), [("dtype", "torch.bfloat16"), ("quantization", "fp8")])
def test_what_the_engine_does_otherwise_is_named(name: str, value: str, target: Target) -> None:
    with pytest.raises(FingerprintMismatchError, match=f"{name}: the fingerprint file has"):
        require_target(target.fingerprint, engine(target, **{name: value}), target.tokenizer, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tap_layers", (0, 1, 2)), ("padded_vocab_size", 5), ("rope_theta", 1.0), ("tokenizer_digest", "0" * 64)],
)
def test_a_fingerprint_of_another_target_is_named(field: str, value: Any, target: Target) -> None:
    with pytest.raises(FingerprintMismatchError, match=field):
        require_target(replace(target.fingerprint, **{field: value}), engine(target), target.tokenizer, None)


def test_the_weights_on_disk_have_the_fingerprints_digest(target: Target) -> None:
    require_weights(target.fingerprint, Path(target.folder))


def test_other_weights_are_named(target: Target) -> None:
    with pytest.raises(FingerprintMismatchError, match=r"the weights in .* have digest"):
        require_weights(replace(target.fingerprint, weights_digest="0" * 64), Path(target.folder))


def test_weights_of_another_dtype_and_folders_without_any_are_not_compared(target: Target, tmp_path: Path) -> None:
    require_weights(replace(target.fingerprint, dtype="bfloat16", weights_digest="0" * 64), Path(target.folder))
    require_weights(replace(target.fingerprint, weights_digest="0" * 64), tmp_path)

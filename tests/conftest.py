"""A tiny random target for every test that needs one: 4 layers, odd vocabulary 131 padded to 136, no network."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_target() -> Any:
    """draftloop.trainers.target.Target over a random Llama in fp32; tap layers (1, 2, 3)."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from draftloop.trainers.target import Target

    torch.set_num_threads(1)
    vocabulary = {f"<{index}>": index for index in range(131)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>", eos_token="<1>", pad_token="<2>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=136,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    # A wider spread than the default initialisation, so that greedy outputs vary instead of repeating one token.
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.25)
    return Target.of(model, fast, folder="tiny", dtype="float32")

"""What several folders of tests share: a tiny random target, and a real Apache Kafka for the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftloop.pipeline.errors import JavaNotFoundError, KafkaJarsNotFoundError
from draftloop.pipeline.stream.broker import LocalBroker, find_java, find_libs
from draftloop.pipeline.stream.kafka_config import KafkaConfig


@pytest.fixture(scope="session")
def tiny_target() -> Any:
    """A Target over a random Llama in fp32: 4 layers, taps (1, 2, 3), odd vocabulary 131 padded to 136, no network."""
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


@pytest.fixture(scope="session")
def kafka_libs() -> Path:
    """The folder of Kafka's jars; skips with how to get them where they or Java are missing."""
    try:
        find_java(os.environ)
        return find_libs(None, os.environ)
    except (JavaNotFoundError, KafkaJarsNotFoundError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def broker(kafka_libs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """The session's broker. Tests keep to topics and users of their own names, and do not stop it."""
    started = LocalBroker(tmp_path_factory.mktemp("kafka") / "home")
    started.up(libs=kafka_libs)
    yield started
    started.down()


@pytest.fixture(scope="session")
def admin(broker: LocalBroker) -> KafkaConfig:
    """How the administrator reaches the session's broker."""
    return broker.client("admin")

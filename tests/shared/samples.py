"""Values that many tests stand on. On pytest's path alone; no test changes them."""

from __future__ import annotations

from typing import Any

from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.stream.access_spec import AccessSpec, parse_spec
from draftloop.pipeline.stream.kafka_config import KafkaSecurity

PRINCIPALS = ("hook", "curator", "trainer", "agent", "officer", "auditor")

FINGERPRINT = Fingerprint(
    weights_digest="a" * 64,
    tokenizer_digest="b" * 64,
    template_digest="c" * 64,
    vocab_size=131,
    padded_vocab_size=136,
    hidden_size=32,
    num_layers=4,
    tap_layers=(1, 2, 3),
    dtype="float32",
    quantization="none",
    max_position_embeddings=512,
    rope_theta=10000.0,
)


def small(**changes: Any) -> dict[str, Any]:
    """A small access file's values, with changes at the top level."""
    return {
        "targets": ["m"],
        "topics": [
            {"name": "draftloop.raw.{target}", "partitions": 2, "retention": "72h"},
            {"name": "draftloop.audit", "partitions": 1, "retention": "forever"},
        ],
        "principals": [
            {"name": "draftloop-hook", "acls": [{"allow": ["WRITE"], "topic_prefix": "draftloop.raw."}]},
            {"name": "draftloop-reader", "acls": [{"allow": ["READ"], "topic": "draftloop.raw.{target}"}]},
        ],
        **changes,
    }


def spec_of(**changes: Any) -> AccessSpec:
    return parse_spec(small(**changes), "test")


def chain(error: BaseException | None) -> str:
    """All that a traceback would show of an error's texts."""
    texts = ""
    while error is not None:
        texts += f"{error!r} {error} "
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return texts


def security(**settings: Any) -> KafkaSecurity:
    """A SCRAM login over TLS, with changes."""
    known: dict[str, Any] = {"username": "hook", "password_file": "/secret", "ca_file": "/ca.pem"}
    return KafkaSecurity(**(known | settings))

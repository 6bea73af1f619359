"""Drafters for the tiny target, and the plain decoding that every engine output is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from draftloop.pipeline.fingerprint import Fingerprint  # noqa: E402
from draftloop.trainers.checkpoint import publish_drafter  # noqa: E402
from draftloop.trainers.eagle3 import Eagle3, Eagle3Config  # noqa: E402

Make = Callable[..., Eagle3]


@pytest.fixture(scope="session")
def make_drafter(tiny_target: Any) -> Make:
    """make_drafter(seed=..., draft_vocab_size=..., max_position_embeddings=...): random weights."""

    def make(*, seed: int, draft_vocab_size: int = 40, max_position_embeddings: int = 512) -> Eagle3:
        generator = torch.Generator().manual_seed(seed)
        config = Eagle3Config(
            hidden_size=tiny_target.fingerprint.hidden_size,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=max_position_embeddings,
            vocab_size=tiny_target.fingerprint.padded_vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_taps=len(tiny_target.fingerprint.tap_layers),
        )
        vocabulary = tiny_target.fingerprint.vocab_size
        ids = torch.randperm(vocabulary, generator=generator)[:draft_vocab_size].sort().values
        model = Eagle3(config, ids)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        return model.eval().requires_grad_(False)

    return make


@pytest.fixture
def publish(tmp_path: Path, tiny_target: Any) -> Callable[..., Path]:
    """publish(name, model, fingerprint=None) -> folder."""

    def write(name: str, model: Eagle3, fingerprint: Fingerprint | None = None) -> Path:
        publish_drafter(
            tmp_path / name,
            model,
            fingerprint=fingerprint or tiny_target.fingerprint,
            snapshot_id=None,
            parents=[],
            training={},
        )
        return tmp_path / name

    return write


def _plain_greedy(target: Any, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Greedy decoding without cache, batch or drafts."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) - len(prompt) < max_tokens:
            token = int(target.model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
            if token in target.eos_ids:
                break
    return tuple(ids[len(prompt) :])


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Eight ragged prompts."""
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 2, 5, 9, 17, 30, 44, 70)
    return [tuple(torch.randint(3, 131, (length,), generator=generator).tolist()) for length in lengths]


@pytest.fixture(scope="session")
def plain(tiny_target: Any, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What plain decoding makes of the prompts, 40 tokens each at most."""
    return [_plain_greedy(tiny_target, prompt, 40) for prompt in prompts]


@pytest.fixture(scope="session")
def trained_drafter(
    tiny_target: Any, make_drafter: Make, prompts: list[tuple[int, ...]], plain: list[tuple[int, ...]]
) -> Eagle3:
    """A drafter that learned the tiny target's answers by heart, one step deep: it gets drafts accepted."""
    model = make_drafter(seed=5, draft_vocab_size=131).train().requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    texts = [torch.tensor([[*prompt, *output]]) for prompt, output in zip(prompts, plain, strict=True)]
    features = [tiny_target.features(text) for text in texts]
    for _ in range(40):
        for text, (taps, last) in zip(texts, features, strict=True):
            positions = torch.arange(text.shape[1] - 1).unsqueeze(0)
            embeds = torch.nn.functional.embedding(text[:, 1:], tiny_target.embedding)
            projected = model.project(embeds, model.fuse(taps[:, :-1]), positions)
            heads = (projected.query, projected.key.repeat_interleave(2, 2), projected.value.repeat_interleave(2, 2))
            seen = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in heads), is_causal=True)
            logits = model.logits(model.finish(seen.transpose(1, 2), projected.residual))
            wanted = (last[:, 1:] @ tiny_target.head.T)[..., :131].argmax(-1)
            loss = torch.nn.functional.cross_entropy(logits[0], wanted[0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval().requires_grad_(False)

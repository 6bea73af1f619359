"""The engine's cache: what was in the memory before must not reach an output."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from draftloop.serving_hooks.embedded.target_runner import SlotCache  # noqa: E402


def test_a_new_cache_is_finite_whatever_the_memory_held_before() -> None:
    like = torch.zeros(1)
    for _ in range(8):
        poison = torch.full((2, 4, 8, 3, 64), float("nan"))
        del poison
        cache = SlotCache(2, 4, 8, (3, 64), like)
        assert not cache.keys.isnan().any()
        assert not cache.values.isnan().any()

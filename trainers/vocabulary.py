"""The draft vocabulary: which target tokens a drafter may propose. A parent's is its descendants'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftloop.pipeline.errors import ConfigError


def count_output_tokens(outputs: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """How often each token id occurs in the outputs, int64 [vocab_size]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for output in outputs:
        counts += torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab_size)
    return counts


def choose_draft_tokens(
    counts: Tensor, size: int, *, always: Iterable[int] = (), vocab_size: int | None = None
) -> Tensor:
    """The `size` tokens to keep, strictly increasing target ids, int64 [size].

    First `always` (end-of-sequence tokens), then the most frequent (ties: lower id), then the lowest unused ids.
    vocab_size: tokens the tokenizer knows; padding rows of the head are never chosen. Raises ConfigError.
    """
    known = int(counts.shape[0]) if vocab_size is None else vocab_size
    if not 0 < size <= known:
        raise ConfigError(
            f"train.draft_vocab_size = {size} for a target of {known} tokens", mend=f"choose 1 to {known}"
        )
    rank = counts[:known].clone()
    for token in always:
        if 0 <= token < known:
            rank[token] = torch.iinfo(torch.int64).max
    # A stable sort puts lower ids first among equals: the unused ids fill up from the lowest.
    return torch.sort(rank, descending=True, stable=True).indices[:size].sort().values


def coverage(counts: Tensor, draft_token_ids: Tensor) -> float:
    """Share of the counted tokens that the draft vocabulary holds; 1.0 where nothing was counted."""
    total = int(counts.sum())
    return int(counts[draft_token_ids].sum()) / total if total else 1.0

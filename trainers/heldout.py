"""Held-out tau during training: the exact walk over logged outputs, with the very forward that is trained."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftloop.trainers.batches import Batch, Document


def walk(drafts: Tensor, document: Document, anchor_start: int) -> tuple[int, int]:
    """(tokens, steps) of serving this document's logged output with these greedy drafts.

    drafts: int64 [T, R] of a batch; anchor_start: this document's first anchor in it. The first output token comes
    from prefill and counts in neither. A step at token position a (the last one emitted) asks row a-1, gains the
    longest match plus one, and is clipped at the end.
    """
    tokens = document.token_ids.tolist()
    last = len(tokens) - 1
    steps = 0
    at = document.prompt_length
    proposals = drafts[:, anchor_start : anchor_start + document.num_anchors].T.tolist()
    while at < last:
        row = at - 1 - document.first
        accepted = 0
        if row >= 0:
            for depth, token in enumerate(proposals[row]):
                if at + 1 + depth > last or tokens[at + 1 + depth] != token:
                    break
                accepted += 1
        steps += 1
        at += accepted + 1
    return last - document.prompt_length, steps


def count_walks(drafts: Tensor, documents: Sequence[Document], batch: Batch) -> tuple[int, int]:
    """Sum of `walk` over a batch's documents."""
    tokens = steps = start = 0
    for document, rows in zip(documents, batch.rows, strict=True):
        own_tokens, own_steps = walk(drafts, document, start)
        tokens, steps, start = tokens + own_tokens, steps + own_steps, start + rows
    return tokens, steps

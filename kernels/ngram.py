"""Prompt lookup: the n-gram floor that needs no drafter. Pure Python, one function for the engine and the judge."""

from __future__ import annotations

from collections.abc import Sequence


def propose_ngram(ids: Sequence[int], *, k: int, max_n: int = 4, min_n: int = 2) -> list[int]:
    """Up to k tokens that followed the most recent earlier occurrence of the longest suffix n-gram of `ids`.

    Tries n = max_n down to min_n; the occurrence ends before the last token, and may overlap the suffix. Empty where
    no such n-gram came before. O(len(ids) * max_n); raises ValueError for k < 1 or not 1 <= min_n <= max_n.
    """
    if k < 1 or not 1 <= min_n <= max_n:
        raise ValueError(f"k={k}, min_n={min_n}, max_n={max_n}: need k >= 1 and 1 <= min_n <= max_n")
    found = _lookup(ids, max_n=max_n, min_n=min_n)
    return [] if found is None else list(ids[found : found + k])


def _lookup(ids: Sequence[int], *, max_n: int, min_n: int) -> int | None:
    """Position just after the chosen earlier occurrence: one scan backwards, the longest suffix match wins."""
    length = len(ids)
    best, best_end = min_n - 1, None
    for end in range(length - 1, 0, -1):  # ids[:end] ends with the candidate occurrence
        size = 0
        while size < max_n and size < end and ids[end - 1 - size] == ids[length - 1 - size]:
            size += 1
        if size > best:
            best, best_end = size, end
            if best == max_n:
                break
    return best_end

"""Which side a row is on, in which order rows come, and how many old ones are kept: pure functions, stable by hash.

Continual training on the newest window alone forgets the older traffic; a share of old rows is replayed into the new
training side, and the old held-out rows stay held out, so that both drafters are judged on old and new traffic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def rank(salt: str, name: str) -> bytes:
    """A stable pseudo-random order: sort by it to choose or to shuffle, the same in every process and cycle."""
    return hashlib.sha256(f"{salt}\0{name}".encode()).digest()


def is_heldout(salt: str, conversation_id: str, fraction: float) -> bool:
    """The split rule: a conversation is held out when its hash falls into the first `fraction` of the range."""
    # 53 bits: a float holds them exactly, so the comparison means the same everywhere.
    return int.from_bytes(rank(salt, conversation_id)[:8], "big") >> 11 < fraction * 2**53


def quotas(available: Mapping[str, int], total: int) -> dict[str, int]:
    """Share `total` places out evenly over slices, at most what each has; unused places go to the others.

    The sum is min(total, sum(available)); two slices that have more to give differ by at most one place.
    """
    given: dict[str, int] = {}
    left = min(total, sum(available.values()))
    # Poorest first: what a slice cannot use is still there to be shared by the richer ones after it.
    for place, name in enumerate(sorted(available, key=lambda name: (available[name], name))):
        given[name] = min(available[name], left // (len(available) - place))
        left -= given[name]
    return dict(sorted(given.items()))


def replay_rows(num_new: int, share: float) -> int:
    """Number of old rows that make up `share` of new and old together. Rounded to nearest."""
    return round(num_new * share / (1 - share))

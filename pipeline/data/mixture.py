"""What a new snapshot keeps of its parent, and how much one tenant may bring: pure functions, deterministic by hash.

Continual training on the newest window alone forgets the older traffic; a share of old rows is replayed into the new
training side, and the old held-out rows stay held out, so that both drafters are judged on old and new traffic.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from draftloop.pipeline.data.snapshot import Row

T = TypeVar("T")


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


def replay(rows: Sequence[Row], total: int, *, slice_key: str, salt: str) -> list[Row]:
    """At most `total` of some old rows, evenly over the values of one slice, by hash of the record id.

    The order of the hash does not change from cycle to cycle: chosen once, a row is chosen again while there is room.
    """
    by_slice: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: rank(salt, row.record_id)):
        by_slice[row.slices.get(slice_key, "")].append(row)
    given = quotas({name: len(members) for name, members in by_slice.items()}, total)
    return [row for name, count in given.items() for row in by_slice[name][:count]]


def replay_rows(num_new: int, share: float) -> int:
    """Number of old rows that make up `share` of new and old together. Rounded to nearest."""
    return round(num_new * share / (1 - share))


def cap_per_owner(
    items: Iterable[T], limit: int | None, *, owner: Callable[[T], str], order: Callable[[T], bytes]
) -> tuple[list[T], list[T]]:
    """(kept, over): at most `limit` items of each owner, the first in the given order; kept stays in that order."""
    kept: list[T] = []
    over: list[T] = []
    seen: dict[str, int] = defaultdict(int)
    for item in sorted(items, key=order):
        seen[owner(item)] += 1
        (kept if limit is None or seen[owner(item)] <= limit else over).append(item)
    return kept, over

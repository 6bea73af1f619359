"""What the plug-in costs the event loop, of the most recent requests."""

from __future__ import annotations

from array import array

_KEPT = 4096


class Timing:
    """One thread writes. Times are microseconds of its processor time a request, start and end together."""

    def __init__(self) -> None:
        self._recent = array("d", bytes(8 * _KEPT))
        self._count = 0

    def add(self, seconds: float) -> None:
        """One more request."""
        self._recent[self._count % _KEPT] = seconds
        self._count += 1

    def summary(self) -> dict[str, float]:
        """count of all; p50, p99 and max of the most recent."""
        ordered = sorted(self._recent[: min(self._count, _KEPT)]) or [0.0]
        most = len(ordered) - 1
        at = {
            "p50": ordered[len(ordered) // 2],
            "p99": ordered[min(int(len(ordered) * 0.99), most)],
            "max": ordered[-1],
        }
        return {"count": self._count, **{name: round(1e6 * seconds, 1) for name, seconds in at.items()}}

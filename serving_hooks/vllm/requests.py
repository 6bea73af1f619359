"""The capture point: each choice of each request, from its start to its end."""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Watch vLLM's requests; once a process."""


def capture_status() -> dict[str, Any]:
    """What capture is doing, for the status route."""
    return {"capturing": False, "counters": None, "last_error": None, "serving_us": {"count": 0, "p50": 0.0}}

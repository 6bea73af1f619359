"""How a target's name becomes a part of topic names. Light: both the work folder and the access file use it."""

from __future__ import annotations

import re


def slug(name: str) -> str:
    """The one form of a target's name in topics: lower case, every run outside [a-z0-9-] as one "-"."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-") or "target"

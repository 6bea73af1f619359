"""The demo's own prompts: two domains written for this project, far apart in words and in the shape of their answers.

A line of `kitchen.jsonl` or `python.jsonl` is one sentence with a gap, `{}`, and what may stand in it. Sentences differ
in what they ask for, and no two fillings of one sentence share an answer, so a held-out prompt is typical, not a copy.
"""

from __future__ import annotations

import importlib.resources
from typing import Literal

import msgspec

Domain = Literal["kitchen", "python"]
DOMAINS: tuple[Domain, ...] = ("kitchen", "python")


class _Sentence(msgspec.Struct, forbid_unknown_fields=True):
    ask: str
    fill: list[str]


def prompts(domain: Domain) -> list[str]:
    """Every prompt of a domain, in a fixed order; sentences take turns, so a prefix is as mixed as the whole."""
    raw = importlib.resources.files(__name__).joinpath(f"{domain}.jsonl").read_bytes()
    sentences = [msgspec.json.decode(line, type=_Sentence) for line in raw.splitlines()]
    longest = max(len(sentence.fill) for sentence in sentences)
    return [
        sentence.ask.replace("{}", sentence.fill[turn])
        for turn in range(longest)
        for sentence in sentences
        if turn < len(sentence.fill)
    ]

"""How every command answers: one JSON object on stdout where that is asked for, else text."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else there.")]


def answer(value: dict[str, Any], wants_json: bool, text: str) -> None:
    """Print the answer."""
    print(json.dumps(value) if wants_json else text)

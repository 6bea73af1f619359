"""What is wrong in an access file, told by the names that stand in it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

_SUBJECTS = {"topics": "topic", "principals": "principal"}


class MendableError(ValueError):
    """What a check refuses, with what to write instead."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(message)
        self.mend = mend


class Told(NamedTuple):
    """A message without its file, and the mend where the refusal knows one."""

    message: str
    mend: str | None


def explain(error: ValidationError, values: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> Told:
    """known: the keys of each kind of table, "" for the file's own. A misspelt key comes before what it then lacks."""
    found = error.errors()
    unknown = [one for one in found if one["type"] == "extra_forbidden"]
    if unknown:
        tables = dict.fromkeys(_table(one["loc"], known) for one in unknown)
        return Told(
            "; ".join(_unknown_key(one["loc"], values, known) for one in unknown),
            "; ".join(f"known keys{f' in {table}' if table else ''}: {', '.join(known[table])}" for table in tables),
        )
    first = found[0]
    mend = getattr((first.get("ctx") or {}).get("error"), "mend", None)
    if first["type"] == "missing":
        table = _table(first["loc"], known)
        place = _place(first["loc"][:-1], values)
        return Told(f"{place}{first['loc'][-1]!r} is missing", f"known keys: {', '.join(known[table])}")
    what = first["msg"].removeprefix("Value error, ")
    place = _place(first["loc"], values)
    subject = place.partition(": ")[0]
    return Told(what if subject and what.startswith(subject) else f"{place}{what}", mend)


def _unknown_key(loc: tuple[int | str, ...], values: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> str:
    key = str(loc[-1])
    near = difflib.get_close_matches(key, known[_table(loc, known)], n=1)
    return f"{_place(loc[:-1], values)}unknown key {key!r}{f', did you mean {near[0]!r}?' if near else ''}"


def _table(loc: tuple[int | str, ...], known: Mapping[str, Sequence[str]]) -> str:
    """The kind of table that the last part of the place is a key of."""
    return next((part for part in reversed(loc[:-1]) if isinstance(part, str) and part in known), "")


def _place(loc: tuple[int | str, ...], values: Mapping[str, Any]) -> str:
    """Where it is, with names in place of numbers: "principal 'draftloop-hook': ACL 2: "."""
    told: list[str] = []
    here: Any = values
    for part in loc:
        before, here = here, _step(here, part)
        if isinstance(part, str):
            told.append(part)
            continue
        kind = told.pop() if told else ""
        name = here.get("name") if isinstance(here, Mapping) else None
        if kind in _SUBJECTS:
            told.append(f"{_SUBJECTS[kind]} {name!r}" if name else f"{_SUBJECTS[kind]} {part + 1} of {len(before)}")
        else:
            told.append(f"ACL {part + 1} of {len(before)}" if kind == "acls" else f"{kind} {part + 1}")
    return "".join(f"{part}: " for part in told)


def _step(here: Any, part: int | str) -> Any:
    try:
        return here[part]
    except (KeyError, IndexError, TypeError):
        return None

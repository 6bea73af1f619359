"""What the `access` messages share: whole command lines, and counts that read right."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple


class Commands(NamedTuple):
    """The `access` commands as they are typed for one home and access file."""

    home: Path | None = None  # None: not known, HOME and FILE stand for both
    access: Path | None = None  # None: draftloop's own

    def line(self, verb: str, *options: str) -> str:
        """The whole command, ready to be pasted."""
        words = ["draftloop", "access", verb]
        if self.home is None:
            words += ["--home", "HOME", "--access", "FILE"]
        else:
            words += ["--home", shlex.quote(str(self.home))]
            words += ["--access", shlex.quote(str(self.access))] if self.access is not None else []
        return f"`{' '.join((*words, *options))}`"


PLACEHOLDERS = Commands()


def counted(number: int, one: str, many: str | None = None) -> str:
    """ "1 copy", "2 copies"."""
    return f"{number} {one if number == 1 else many or one + 's'}"

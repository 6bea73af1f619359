"""What a person sees while a command works: bars and lines on stderr, so that stdout stays the answer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """One bar on the screen."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def __call__(self, done: int, note: str = "") -> None:
        """Set how much is done, and the note beside the bar."""
        self._progress.update(self._task, completed=done, note=note)

    def total(self, total: int) -> None:
        """Set how much there is to do, where it was not known at the start."""
        self._progress.update(self._task, total=total)


class Screen:
    """Lines and progress bars on stderr; a screen made with quiet=True shows nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text)

    def rule(self, title: str) -> None:
        """A heading."""
        self._console.rule(title, align="left")

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        """A bar for the block; the yielded object sets how much is done and the note beside it."""
        columns = (
            TextColumn("{task.description:<28}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(title, total=total, note="")
            yield Bar(progress, task)

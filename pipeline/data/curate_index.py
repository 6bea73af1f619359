"""The decisions between entries of a window, and between them and the parent snapshot, over an index on disk.

A row of the index is about 200 bytes and every decision is one sort or scan of it by SQLite, which spills what is over
its cache: memory does not grow with the window. SQLite's own temporary files go where it always puts them (the folder
$SQLITE_TMPDIR or $TMPDIR names, else /var/tmp) and need about as much room as the index.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from draftloop.pipeline.data.candidate import IndexEntry, ParentRow
from draftloop.pipeline.data.mixture import quotas
from draftloop.pipeline.data.snapshot import SPLITS, Reject, Split

CACHE_KB = 32 << 10  # also what one sort may hold in memory

_SETUP = """
PRAGMA page_size = 16384;
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA temp_store = FILE;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, -- in the order of partition and offset
    partition INTEGER NOT NULL, offset INTEGER NOT NULL, reason TEXT, record_id TEXT, rank BLOB, digest BLOB,
    side TEXT, content BLOB, tenant TEXT, policy TEXT, conversation TEXT, place INTEGER, size INTEGER,
    num_offsets INTEGER NOT NULL -- from this one on
);
CREATE TABLE parent (
    id INTEGER PRIMARY KEY, side TEXT NOT NULL, position INTEGER NOT NULL, rank BLOB NOT NULL, content BLOB NOT NULL,
    replay BLOB NOT NULL, slice TEXT NOT NULL, conversation TEXT NOT NULL, replaced INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE carried (
    side TEXT NOT NULL, rank BLOB NOT NULL, slice TEXT NOT NULL, position INTEGER NOT NULL, conversation TEXT NOT NULL,
    place INTEGER NOT NULL, size INTEGER NOT NULL
);
CREATE TABLE quotas (side TEXT NOT NULL, slice TEXT NOT NULL, places INTEGER NOT NULL, PRIMARY KEY (side, slice));
CREATE TABLE verdicts (id INTEGER PRIMARY KEY, reason TEXT NOT NULL);
BEGIN;
"""

# Window functions cost several times a plain sort, so they see only what a sort has shown to be there more than once.

# Of entries with one record id the one with the smallest bytes is kept: offsets depend on who wrote first.
_DUPLICATE_RECORD = """
INSERT INTO verdicts SELECT id, 'duplicate_record' FROM (
    SELECT id, ROW_NUMBER() OVER (PARTITION BY rank ORDER BY digest, id) AS nth FROM entries
    WHERE rank IN (SELECT rank FROM entries WHERE rank IS NOT NULL GROUP BY rank HAVING COUNT(*) > 1)
) WHERE nth > 1
"""

# `allowed` is the first entry by rank with this content that the parent does not hold on the other side: it is kept,
# what comes after it repeats it, and what came before it was refused for the parent's sake.
_CONTENT = """
INSERT INTO verdicts SELECT id, CASE
        WHEN NOT seen OR rank > allowed THEN 'duplicate_content'
        WHEN side = 'heldout' THEN 'seen_in_training'
        ELSE 'seen_in_heldout'
    END FROM (
        SELECT id, side, rank, seen, MIN(CASE WHEN NOT seen THEN rank END) OVER (PARTITION BY content) AS allowed FROM (
            SELECT id, side, rank, content, EXISTS (
                SELECT 1 FROM parent WHERE parent.content = entries.content AND parent.side <> entries.side
            ) AS seen FROM entries WHERE reason IS NULL AND (
                content IN (SELECT content FROM entries WHERE reason IS NULL GROUP BY content HAVING COUNT(*) > 1)
                OR EXISTS (SELECT 1 FROM parent WHERE parent.content = entries.content)
            )
        )
    ) WHERE allowed IS NULL OR rank <> allowed
"""

_TENANT_CAP = """
INSERT INTO verdicts SELECT id, 'tenant_cap' FROM (
    SELECT id, ROW_NUMBER() OVER (PARTITION BY tenant ORDER BY rank) AS nth FROM entries WHERE reason IS NULL
) WHERE nth > ?
"""

_APPLY = """
UPDATE entries SET reason = (SELECT reason FROM verdicts WHERE verdicts.id = entries.id)
WHERE id IN (SELECT id FROM verdicts)
"""

_REPLACED = """
UPDATE parent SET replaced = 1 WHERE id IN (
    SELECT parent.id FROM entries CROSS JOIN parent ON parent.{0} = entries.{0} WHERE entries.reason IS NULL
)
"""

_CHOSEN = """
SELECT position, rank, slice, conversation FROM (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY slice ORDER BY replay, position) AS nth
    FROM parent WHERE side = ? AND NOT replaced
) JOIN quotas USING (side, slice) WHERE nth <= places ORDER BY position
"""

_ROWS = """
SELECT rank, place, size FROM (
    SELECT rank, 0 AS old, '' AS slice, 0 AS position, place, size FROM entries WHERE reason IS NULL AND side = ?1
    UNION ALL SELECT rank, 1, slice, position, place, size FROM carried WHERE side = ?1
) ORDER BY rank, old, slice, position
"""

_CONVERSATIONS = """
SELECT TOTAL(high = 'train'), TOTAL(low = 'heldout'), TOTAL(low <> high), MIN(CASE WHEN low <> high THEN name END)
FROM (
    SELECT name, MIN(side) AS low, MAX(side) AS high FROM (
        SELECT conversation AS name, side FROM entries WHERE reason IS NULL
        UNION ALL SELECT conversation, side FROM carried
    ) GROUP BY name
)
"""


class Chosen(NamedTuple):
    """A row of the parent that goes into the new snapshot."""

    position: int
    rank: bytes
    slice: str
    conversation: str


class Conversations(NamedTuple):
    """How many conversations each side has, how many are on both, and the first of those by name."""

    num_by_side: dict[Split, int]
    num_shared: int
    shared: str | None


class CurationIndex:
    """One curation's index; every method may raise sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute(f"PRAGMA cache_size = -{CACHE_KB}")
        self._db.executescript(_SETUP)

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def add_entries(self, entries: Iterable[IndexEntry]) -> None:
        """Every offset of the window once, ordered by partition and offset."""
        self._insert("entries", IndexEntry._fields, entries)

    def add_parent(self, rows: Iterable[ParentRow]) -> None:
        """Every row of the parent snapshot."""
        self._insert("parent", ParentRow._fields, rows)
        self._db.execute("CREATE INDEX parent_content ON parent (content, side)")
        self._db.execute("CREATE INDEX parent_rank ON parent (rank)")

    def decide(self, max_rows_per_tenant: int | None) -> None:
        """Drop repeated records and contents, content of the parent's other side, and what is over a tenant's cap."""
        self._apply(_DUPLICATE_RECORD)
        self._apply(_CONTENT)
        if max_rows_per_tenant is not None:
            self._apply(_TENANT_CAP, max_rows_per_tenant)
        for column in ("rank", "content"):  # what comes again is taken from the window
            self._db.execute(_REPLACED.format(column))

    def choose(self, side: Split, total: int) -> Iterator[Chosen]:
        """At most `total` rows of the parent's side, evenly over slices, ordered by their position there."""
        query = "SELECT slice, COUNT(*) FROM parent WHERE side = ? AND NOT replaced GROUP BY slice"
        given = quotas(dict(self._db.execute(query, (side,))), total)
        self._db.executemany("INSERT INTO quotas VALUES (?, ?, ?)", ((side, *item) for item in given.items()))
        return map(Chosen._make, self._db.execute(_CHOSEN, (side,)))

    def add_carried(self, side: Split, rows: Iterable[tuple[Chosen, int, int]]) -> None:
        """The chosen rows with their place and size in the spill."""
        values = ((side, row.rank, row.slice, row.position, row.conversation, *spilled) for row, *spilled in rows)
        self._db.executemany("INSERT INTO carried VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def num_kept(self) -> dict[Split, int]:
        """Rows of the window by side."""
        return self._by_side("SELECT side, COUNT(*) FROM entries WHERE reason IS NULL GROUP BY side")

    def num_carried(self) -> dict[Split, int]:
        """Rows of the parent by side."""
        return self._by_side("SELECT side, COUNT(*) FROM carried GROUP BY side")

    def num_rejected(self) -> dict[str, int]:
        """Rejects by reason."""
        query = "SELECT reason, SUM(num_offsets) FROM entries WHERE reason IS NOT NULL GROUP BY reason ORDER BY reason"
        return dict(self._db.execute(query))

    def num_by_policy(self) -> dict[str, int]:
        """Rows of the window by the version of the consent policy."""
        query = "SELECT policy, COUNT(*) FROM entries WHERE reason IS NULL GROUP BY policy ORDER BY policy"
        return dict(self._db.execute(query))

    def conversations(self) -> Conversations:
        """Conversations of kept and carried rows."""
        train, heldout, num_shared, shared = self._db.execute(_CONVERSATIONS).fetchone()
        return Conversations({"train": int(train), "heldout": int(heldout)}, int(num_shared), shared)

    def rows(self, side: Split) -> Iterator[tuple[bytes, int, int]]:
        """Rank, place and size of every row of one side, ordered by rank."""
        return self._db.execute(_ROWS, (side,))

    def rejects(self) -> Iterator[Reject]:
        """Every reject, ordered by its place in the log."""
        query = f"SELECT {', '.join(Reject._fields)} FROM entries WHERE reason IS NOT NULL ORDER BY id"
        return map(Reject._make, self._db.execute(query))

    def _insert(self, table: str, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
        marks = ", ".join("?" for _ in columns)
        self._db.executemany(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", rows)

    def _apply(self, verdicts: str, *parameters: int) -> None:
        self._db.execute(verdicts, parameters)
        self._db.execute(_APPLY)
        self._db.execute("DELETE FROM verdicts")

    def _by_side(self, query: str) -> dict[Split, int]:
        found: Mapping[Split, int] = dict(self._db.execute(query))
        return {side: found.get(side, 0) for side in SPLITS}

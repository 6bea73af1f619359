"""Rows as bytes: one canonical form that is hashed, spilled and turned into Arrow columns, never into lists of numbers.

An Arrow folder here is what `datasets.load_from_disk` reads. It is written and read a batch at a time through plain
files: mapped pages would count as memory of this process.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from draftloop.pipeline.data.spill import BUFFER_BYTES
from draftloop.pipeline.errors import SnapshotError
from draftloop.pipeline.records import pack_floats, pack_ids

if TYPE_CHECKING:
    from draftloop.pipeline.data.snapshot import Row

# Arrow and numpy come in late: the command line imports this module and must run where neither is installed.

BATCH_ROWS = 1000
BATCH_BYTES = 8 << 20  # whichever comes first: rows of long contexts are a hundred times the usual size
CACHED_CHARS = 256  # slices repeat or are long: the cache must not hold thousands of long ones
ARROW_FILE = "data-00000-of-00001.arrow"


class PackedRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A row in its canonical form. Ids are little-endian uint32, logprobs float32, the temperature one float64."""

    record_id: str
    conversation_id: str
    prompt_ids: bytes
    output_ids: bytes
    slices: tuple[tuple[str, str], ...]  # sorted by name
    temperature: bytes
    logprobs: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PackedRow)
_LISTS: dict[str, Literal["int32", "float32"]] = {"prompt_ids": "int32", "output_ids": "int32", "logprobs": "float32"}
_DTYPES = {"record_id": "string", "conversation_id": "string", "slices": "string", "temperature": "float64"}


def pack(row: Row) -> bytes:
    """The canonical bytes of a row: equal for rows that mean the same (0 and 0.0 are one temperature)."""
    ids = pack_ids(row.prompt_ids), pack_ids(row.output_ids)
    slices = tuple(sorted(row.slices.items()))
    packed = PackedRow(
        row.record_id, row.conversation_id, *ids, slices, pack_temperature(row.temperature), pack_floats(row.logprobs)
    )
    return encode_row(packed)


def pack_temperature(temperature: float) -> bytes:
    """A temperature as it enters the canonical form."""
    return struct.pack("<d", temperature)


def encode_row(row: PackedRow) -> bytes:
    """The bytes that are hashed and spilled."""
    return _encoder.encode(row)


def decode_row(raw: bytes) -> PackedRow:
    """The inverse of encode_row, for bytes of our own writing."""
    return _decoder.decode(raw)


def write_folder(folder: Path, rows: Iterable[bytes]) -> int:
    """Write packed rows as an Arrow folder, streamed; returns the number of their output tokens.

    `finish_folder` completes it. Raises SnapshotError for an id over int32, OSError.
    """
    import pyarrow as pa  # type: ignore[import-untyped]

    folder.mkdir()
    num_tokens = 0
    schema = _schema()
    with _Pieces(folder / ARROW_FILE) as sink, pa.ipc.new_stream(sink, schema) as stream:
        for batch in _batches(rows):
            num_tokens += sum(len(row.output_ids) for row in batch) // 4
            stream.write_batch(pa.RecordBatch.from_arrays(_columns(batch), schema=schema))
    return num_tokens


def finish_folder(folder: Path, name: str) -> None:
    """Write what `datasets` asks for beside the rows. `name` (letters, digits, dashes) tells this content apart."""
    info = {"citation": "", "description": "", "features": _features(), "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": ARROW_FILE}],
        "_fingerprint": name,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    for file, value in (("dataset_info.json", info), ("state.json", state)):
        (folder / file).write_text(json.dumps(value, indent=2), encoding="utf-8")


def read_folder(folder: Path) -> Iterator[Any]:
    """The Arrow record batches of a folder, one in memory at a time. Raises OSError, ValueError, KeyError."""
    import pyarrow as pa

    for file in json.loads((folder / "state.json").read_bytes())["_data_files"]:
        with pa.OSFile(str(folder / file["filename"])) as source, pa.ipc.open_stream(source) as stream:
            yield from stream


def unpack_batch(batch: Any) -> list[PackedRow]:
    """The rows of a record batch. Raises KeyError for a missing column, ValueError."""
    texts = {name: batch.column(name).to_pylist() for name in _DTYPES}
    lists = {name: list(_slices(batch.column(name))) for name in _LISTS}
    columns = {**texts, **lists}
    columns["slices"] = [_parsed(text) for text in columns["slices"]]
    columns["temperature"] = [pack_temperature(temperature) for temperature in columns["temperature"]]
    return [PackedRow(*values) for values in zip(*(columns[name] for name in PackedRow.__struct_fields__), strict=True)]


class _Pieces(io.RawIOBase):
    """A file written in pieces of the size in which spilled rows were written.

    The page cache then takes the memory that these have just left. For large pieces it takes fresh memory, which has to
    be mapped first: on a virtual machine that was a quarter of all the time of writing a million rows.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb", buffering=0)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BUFFER_BYTES):
            piece = view[start : start + BUFFER_BYTES]
            while piece:  # a write may take less than it was given
                piece = piece[self._file.write(piece) :]
        return len(view)

    def close(self) -> None:
        self._file.close()
        super().close()


def _parsed(text: str) -> tuple[tuple[str, str], ...]:
    return _parsed_short(text) if len(text) <= CACHED_CHARS else _parsed_short.__wrapped__(text)


def _json(slices: tuple[tuple[str, str], ...]) -> str:
    short = sum(len(name) + len(value) for name, value in slices) <= CACHED_CHARS
    return _json_short(slices) if short else _json_short.__wrapped__(slices)


@functools.lru_cache(maxsize=4096)
def _parsed_short(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(json.loads(text).items()))


@functools.lru_cache(maxsize=4096)
def _json_short(slices: tuple[tuple[str, str], ...]) -> str:
    return json.dumps(dict(slices), sort_keys=True)


def _batches(rows: Iterable[bytes]) -> Iterator[list[PackedRow]]:
    batch: list[PackedRow] = []
    size = 0
    for raw in rows:
        batch.append(decode_row(raw))
        size += len(raw)
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _columns(batch: list[PackedRow]) -> list[Any]:
    """One Arrow array per column, in the order of the schema."""
    import numpy as np
    import pyarrow as pa

    def lists(parts: list[bytes], name: str) -> Any:
        dtype = np.dtype(_LISTS[name])
        offsets = np.zeros(len(parts) + 1, dtype=np.int32)
        np.cumsum([len(part) // 4 for part in parts], out=offsets[1:])
        values = np.frombuffer(b"".join(parts), dtype=dtype.newbyteorder("<")).astype(dtype, copy=False)
        if name != "logprobs" and values.size and values.min() < 0:
            largest = int(values.view(np.uint32).max())
            raise SnapshotError(
                f"a token id of {name} is {largest}, a snapshot holds up to {2**31 - 1}",
                mend="find out what wrote it: no vocabulary is that large",
            )
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

    return [
        pa.array([row.record_id for row in batch], pa.string()),
        pa.array([row.conversation_id for row in batch], pa.string()),
        lists([row.prompt_ids for row in batch], "prompt_ids"),
        lists([row.output_ids for row in batch], "output_ids"),
        pa.array([_json(row.slices) for row in batch], pa.string()),
        pa.array(np.frombuffer(b"".join(row.temperature for row in batch), dtype="<f8").astype(np.float64)),
        lists([row.logprobs for row in batch], "logprobs"),
    ]


def _slices(column: Any) -> Iterator[bytes]:
    """The values of a list column of 4-byte numbers, as little-endian bytes per row."""
    values = column.values.to_numpy(zero_copy_only=True)
    raw = memoryview(values.astype(values.dtype.newbyteorder("<"), copy=False).view("u1"))
    offsets = column.offsets.to_pylist()
    for start, stop in itertools.pairwise(offsets):
        yield bytes(raw[4 * start : 4 * stop])


def _features() -> dict[str, Any]:
    """The columns in the words of `datasets`."""

    def feature(name: str) -> dict[str, Any]:
        if name in _LISTS:
            return {"feature": {"dtype": _LISTS[name], "_type": "Value"}, "_type": "List"}
        # Slices are JSON text: an Arrow struct would give every row every other row's keys.
        return {"dtype": _DTYPES[name], "_type": "Value"}

    return {name: feature(name) for name in PackedRow.__struct_fields__}


def _schema() -> Any:
    import pyarrow as pa

    kinds = {"string": pa.string(), "float64": pa.float64(), "int32": pa.int32(), "float32": pa.float32()}
    fields = [
        pa.field(name, pa.list_(kinds[_LISTS[name]]) if name in _LISTS else kinds[_DTYPES[name]])
        for name in PackedRow.__struct_fields__
    ]
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": _features()}})})

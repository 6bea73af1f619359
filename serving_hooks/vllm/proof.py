"""Is what the engine drafts with exactly what a file says? Read out of the live modules, weight by weight.

vLLM stacks q, k, v and gate, up into one weight and, on CPU, repacks a linear layer's weight for its kernel and throws
the plain one away. Such a layer is read through its own kernel: row k of the identity matrix gives column k of the
weight, exactly, for every product but one is with zero. Subnormal numbers and the sign of zero may be lost on the way
and do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_STACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_NOT_LOADED = frozenset({"t2d"})  # the inverse map, which engines do not use
# What one short call compares at most: requests run only between two calls.
_BYTES = 16 * 2**20  # of a plain weight
_COLUMNS = range(16, 257)  # of a packed weight; fewer than the first are no quicker, its kernel reads all of it
_PRODUCTS = 2**30  # of a packed weight, as far as _COLUMNS allow


class Place(NamedTuple):
    """Where a tensor of a drafter file lies in the live model, on this worker."""

    module: nn.Module
    attribute: str
    row: int  # first row in the live parameter
    rows: slice  # of the file's tensor
    columns: slice


class Piece(NamedTuple):
    """What is compared at once: rows of a plain weight, or columns of a packed one."""

    packed: bool
    of: range


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest a drafter's manifest names: sha256 over names, shapes, dtypes and bytes, in name order."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        if name not in _NOT_LOADED:
            digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
            digest.update(_bytes(value))
    return digest.hexdigest()


def differing(
    model: nn.Module, tensors: Mapping[str, Tensor], columns: int | None = None, piece: int | None = None
) -> list[str]:
    """Names of the file's tensors that the live drafter does not hold exactly.

    columns: look at this many, evenly spread, columns of each packed weight; None for all. piece: look at this piece
    of each tensor, of those `pieces` counts; one past the end differs in nothing. A drafter that was not loaded, or
    another one, differs in all of them.
    """
    return [
        name
        for name, value in tensors.items()
        if name not in _NOT_LOADED and not _same(model, name, value, columns, piece)
    ]


def pieces(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Into how many pieces each of the file's tensors is cut on this worker; one at least."""
    counts = {}
    for name, value in tensors.items():
        if name not in _NOT_LOADED:
            place = _place(model, name, value)
            counts[name] = 1 if place is None else max(1, len(_cut(place, _wanted(place, value), None)))
    return counts


def model_digest(model: nn.Module) -> str:
    """sha256 over everything a model computes with: its parameters, and the packed weights read back."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(_bytes(parameter))
    for name, module in sorted(model.named_modules()):
        if is_packed(module) and (inputs := _inputs(module)) is not None:
            digest.update(name.encode())
            # A piece at a time: the identity of a wide layer would be as large as the layer.
            for piece in _ranges(range(inputs), _COLUMNS[-1]):
                digest.update(_bytes(_unpacked(module, inputs, torch.tensor(piece))))
    return digest.hexdigest()


def _same(model: nn.Module, name: str, value: Tensor, columns: int | None, piece: int | None) -> bool:
    place = _place(model, name, value)
    if place is None:
        return False
    wanted = _wanted(place, value)
    cut = _cut(place, wanted, columns)
    if not cut:  # no weight to compare with
        return False
    return all(_equal(place, wanted, one) for one in (cut if piece is None else cut[piece : piece + 1]))


def _wanted(place: Place, value: Tensor) -> Tensor:
    """What this worker holds of a file's tensor."""
    return value[place.rows] if value.ndim == 1 else value[place.rows, place.columns]


def _cut(place: Place, wanted: Tensor, columns: int | None) -> list[Piece]:
    live: Tensor = getattr(place.module, place.attribute)
    rows = wanted.shape[0]
    cut = []
    if live.numel():
        a_row = wanted.numel() // rows * max(wanted.element_size(), live.element_size()) if rows else 1
        cut += [Piece(False, one) for one in _ranges(range(rows), max(1, _BYTES // a_row))]
    if place.attribute == "weight" and is_packed(place.module):
        inputs = wanted.shape[1]
        at_once = min(max(_PRODUCTS // max(1, inputs * rows), _COLUMNS[0]), _COLUMNS[-1])
        step = max(1, inputs // columns) if columns else 1
        cut += [Piece(True, one) for one in _ranges(range(0, inputs, step), at_once)]
    return cut


def _equal(place: Place, wanted: Tensor, piece: Piece) -> bool:
    """Compared where the live weight lies: what moves is a piece of the file's."""
    live: Tensor = getattr(place.module, place.attribute)
    if piece.packed:
        columns = torch.tensor(piece.of)
        found = _unpacked(place.module, wanted.shape[1], columns)[place.row : place.row + wanted.shape[0]]
        return torch.equal(found, _normal(wanted[:, columns], live.dtype))
    found = live.detach()[place.row + piece.of.start : place.row + piece.of.stop]
    return torch.equal(found, wanted[piece.of.start : piece.of.stop].to(device=live.device, dtype=live.dtype))


def _place(model: nn.Module, name: str, value: Tensor) -> Place | None:
    """None where the model has no such weight, or one of another shape."""
    if name == "d2t":
        return Place(model, "draft_id_to_target_id", 0, slice(None), slice(None))
    path, _, attribute = name.replace("midlayer.", "layers.0.").rpartition(".")
    parent, _, leaf = path.rpartition(".")
    stacked, shard = _STACKED.get(leaf, (leaf, 0))
    full = ".".join(part for part in ("" if leaf == "lm_head" else "model", parent, stacked) if part)
    try:
        module = model.get_submodule(full)
    except AttributeError:
        return None
    if getattr(module, attribute, None) is None:
        return None
    sizes = _shard_rows(module, stacked, value)
    rank = int(getattr(module, "tp_rank", 0))
    of_shard = rank // int(getattr(module, "num_kv_head_replicas", 1)) if leaf in ("k_proj", "v_proj") else rank
    if stacked in ("qkv_proj", "gate_up_proj") or sizes[shard] < value.shape[0]:
        rows = slice(of_shard * sizes[shard], (of_shard + 1) * sizes[shard])
    else:
        rows = slice(None)
    inputs = _inputs(module) if value.ndim == 2 else None
    narrow = inputs is not None and inputs < value.shape[1]
    columns = slice(rank * inputs, (rank + 1) * inputs) if narrow and inputs is not None else slice(None)
    return Place(module, attribute, sum(sizes[:shard]), rows, columns)


def _shard_rows(module: Any, stacked: str, value: Tensor) -> tuple[int, ...]:
    """Rows of each of the stacked tensors on this worker."""
    if stacked == "qkv_proj":
        kv = module.num_kv_heads * module.head_size
        return (module.num_heads * module.head_size, kv, kv)
    if stacked == "gate_up_proj":
        return tuple(size // int(module.tp_size) for size in module.output_sizes)
    if hasattr(module, "num_embeddings_per_partition"):  # padded at its end
        return (min(int(module.num_embeddings_per_partition), value.shape[0]),)
    return (int(getattr(module, "output_size_per_partition", value.shape[0])),)


def is_packed(module: Any) -> bool:
    """Whether a layer computes from a copy of its weight that its kernel has packed."""
    kernel = getattr(module, "cpu_linear", None)
    return kernel is not None and kernel is not nn.functional.linear


def _inputs(module: Any) -> int | None:
    """Columns of a layer's weight on this worker."""
    for name in ("input_size_per_partition", "embedding_dim", "input_size"):
        if hasattr(module, name):
            return int(getattr(module, name))
    return None


def _unpacked(module: Any, inputs: int, columns: Tensor) -> Tensor:
    """These columns of a packed weight: [rows, len(columns)]."""
    one_hot = torch.zeros(len(columns), inputs, dtype=module.weight.dtype)
    one_hot[torch.arange(len(columns)), columns] = 1
    read: Tensor = module.cpu_linear(one_hot, module.weight, None).T
    return _normal(read, module.weight.dtype)


def _ranges(whole: range, length: int) -> list[range]:
    """The range in pieces of that length, the last one shorter."""
    return [whole[start : start + length] for start in range(0, len(whole), length)]


def _normal(value: Tensor, dtype: torch.dtype) -> Tensor:
    value = value.to(dtype)
    return torch.where(value.abs() < torch.finfo(dtype).tiny, torch.zeros((), dtype=dtype), value)


def _bytes(value: Tensor) -> Any:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def stale_buffers(model: Any) -> list[str]:
    """Names of derived tensors that are not what the live weights give."""
    held = dict(fused_buffers(model))
    if not held:
        return []
    attention = [layer.self_attn for layer in model.model.layers]
    wanted = {
        "_fused_kv_weight": lambda: torch.cat([one.qkv_proj.weight[one.q_size :] for one in attention]),
        "_fused_kv_bias": lambda: torch.cat([one.qkv_proj.bias[one.q_size :] for one in attention]),
        "_k_norm_weights": lambda: torch.stack([one.k_norm.weight for one in attention]),
    }
    return [name for name, value in held.items() if not torch.equal(value, wanted[name]())]


def fused_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The copies of its own weights that a DFlash drafter keeps, as vLLM names them."""
    inner = getattr(model, "model", None)
    for name in ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights"):
        value = getattr(inner, name, None)
        if isinstance(value, Tensor):
            yield name, value

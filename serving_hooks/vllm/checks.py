"""Everything that must hold before an engine is touched: plain file reading and comparing, no engine, no torch.

vLLM takes a drafter of another shape, fails half way and dies at its next step; it takes an incomplete one and mixes
old with new. So whatever can be known from the files is known before a request is made to wait.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from draftloop.pipeline import artifact, signature
from draftloop.pipeline.errors import CheckpointError, InputError, SwapRefusedError
from draftloop.pipeline.fingerprint import Fingerprint, require_same

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAKE_AGAIN = "make the drafter again with `draftloop train` and stage it again; nothing was changed"
_RESTART = "a drafter of another form needs a restarted engine: start it with this drafter, behind a router"
# What may differ between two drafters of one engine: who wrote the folder, and what only training looks at.
_FREE_KEYS = frozenset(
    {"speculators_version", "transformers_version", "embed_requires_grad", "speculators_config.verifier.name_or_path"}
)
_MAX_HEADER = 16 * 2**20  # bytes
_PIECE = 4 * 2**20  # bytes read at once
_ITEM = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
# Exponent bits all set means NaN or infinity, in every IEEE width.
_EXPONENT: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}


class TensorForm(msgspec.Struct, frozen=True):
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a swap looks at in a drafter's manifest.json."""

    family: str
    fingerprint: dict[str, Any]
    tensor_digest: str
    files: dict[str, str]  # name -> sha256


@dataclass(frozen=True)
class Boot:
    """The drafter folder the engine was started with: what every later one must look like."""

    folder: Path
    digest: str
    manifest: Manifest
    config: Mapping[str, Any]  # dotted key -> value
    tensors: Mapping[str, TensorForm]


@dataclass(frozen=True)
class Rules:
    """What the operator set: where versions are staged, whose verdicts count, how large a drafter may be."""

    staging: Path
    fingerprint: Fingerprint
    max_bytes: int
    public_key: Ed25519PublicKey | None = None


@dataclass(frozen=True)
class Checked:
    """A drafter that may enter the engine."""

    version: str
    digest: str  # of the folder
    tensors: str  # of the tensors, as the manifest names them
    weights: Path
    sha256: str  # of the weights file
    forms: Mapping[str, TensorForm] = field(repr=False)


def read_boot(folder: Path) -> Boot:
    """Verify and describe the folder an engine was started with. Raises CheckpointError."""
    manifest, digest = _opened(folder)
    tensors, _ = header(folder / WEIGHTS)
    return Boot(folder, digest, manifest, _config(folder), tensors)


def check_version(version: str, digest: str, boot: Boot, rules: Rules) -> Checked:
    """Raise the error that says why this version may not enter the engine; read its weights once.

    Raises InputError (no plain version), CheckpointError (the folder is damaged or of another form),
    FingerprintMismatchError (of another target), SwapRefusedError (not the digest asked for, no verdict for it).
    """
    if not _VERSION.fullmatch(version):
        raise InputError(f"version {version!r} is no plain version", mend="name a version, not a path")
    folder = rules.staging / version
    try:
        _check_plain(folder, rules.max_bytes)
    except OSError as error:
        raise CheckpointError(
            f"drafter {folder} cannot be read: {error}", mend="check the disk and the folder's rights"
        ) from None
    manifest, found = _opened(folder)
    if found != digest:
        raise SwapRefusedError(
            f"version {version} is drafter {found}, asked for was {digest}", mend="stage the version again"
        )
    _check_allowed(version, found, boot, rules)
    fingerprint = _fingerprint(folder, manifest)
    require_same(rules.fingerprint, fingerprint, expected_of="the engine's target", found_of=f"drafter {version}")
    _check_form(folder, manifest, boot)
    forms, start = header(folder / WEIGHTS)
    _check_same_tensors(version, forms, boot.tensors)
    rows = min(fingerprint.padded_vocab_size, int(boot.config["transformer_layer_config.vocab_size"]))
    sha256 = _check_values(folder / WEIGHTS, forms, start, rows)
    if sha256 != manifest.files[WEIGHTS]:
        raise CheckpointError(f"drafter {folder}: {WEIGHTS} was altered while it was checked", mend=_MAKE_AGAIN)
    return Checked(version, found, manifest.tensor_digest, folder / WEIGHTS, sha256, forms)


def _check_plain(folder: Path, max_bytes: int) -> None:
    if folder.is_symlink():
        raise InputError(f"{folder} is a link", mend="stage the folder itself")
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"drafter {folder}: {path.name} is no plain file", mend="stage the folder again")
        if path.stat().st_size > max_bytes:
            raise CheckpointError(
                f"drafter {folder}: {path.name} has {path.stat().st_size} bytes, at most {max_bytes} are read",
                mend="set swap.max_drafter_bytes higher if the drafter is right",
            )


def _opened(folder: Path) -> tuple[Manifest, str]:
    raw = artifact.verify(folder, kind="drafter", error=CheckpointError)
    try:
        manifest = msgspec.convert(raw, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"drafter {folder}: {artifact.MANIFEST}: {error}", mend=_MAKE_AGAIN) from None
    for name in (CONFIG, WEIGHTS):
        if name not in manifest.files:
            raise CheckpointError(f"drafter {folder} has no {name}", mend=_MAKE_AGAIN)
    try:
        return manifest, (folder / artifact.MARKER).read_text().strip()
    except OSError as error:
        raise CheckpointError(f"drafter {folder}: {artifact.MARKER}: {error}", mend=_MAKE_AGAIN) from None


def _fingerprint(folder: Path, manifest: Manifest) -> Fingerprint:
    try:
        return Fingerprint.from_dict(manifest.fingerprint)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"drafter {folder}: its fingerprint: {error}", mend=_MAKE_AGAIN) from None


def _check_allowed(version: str, digest: str, boot: Boot, rules: Rules) -> None:
    """A signed verdict, or the drafter the operator started the engine with."""
    if digest == boot.digest:
        return
    if rules.public_key is None:
        raise SwapRefusedError(
            "no public key is set, so no verdict can be checked", mend="set swap.public_key to the signer's .pub file"
        )
    path = rules.staging.parent / "verdicts" / f"{version}.json"
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SwapRefusedError(
            f"version {version} has no verdict: {error}", mend="the agent puts it there when it stages a version"
        ) from None
    if not isinstance(document, dict):
        raise SwapRefusedError(f"verdict {path} is no object", mend="stage the version again")
    signature.check(document, rules.public_key, digest=digest, fingerprint=rules.fingerprint)


def _check_form(folder: Path, manifest: Manifest, boot: Boot) -> None:
    if manifest.family != boot.manifest.family:
        raise SwapRefusedError(
            f"drafter {folder} is of family {manifest.family!r}, the engine drafts with {boot.manifest.family!r}",
            mend=_RESTART,
        )
    odd = sorted(manifest.files.keys() ^ boot.manifest.files.keys())
    if odd:  # vLLM looks for more files than these, pickled ones among them
        raise SwapRefusedError(
            f"drafter {folder}: file {odd[0]} is in only one of this drafter and the one at the start", mend=_RESTART
        )
    config = _config(folder)
    for key in sorted(boot.config.keys() | config.keys()):
        have, want = config.get(key, "nothing"), boot.config.get(key, "nothing")
        if have != want:
            raise SwapRefusedError(
                f"drafter {folder}: {CONFIG}: {key} is {have!r}, the engine was started with {want!r}", mend=_RESTART
            )


def _config(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"drafter {folder}: {CONFIG}: {error}", mend=_MAKE_AGAIN) from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"drafter {folder}: {CONFIG} is no object", mend=_MAKE_AGAIN)
    return {key: value for key, value in _dotted(raw) if key not in _FREE_KEYS}


def _dotted(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{before}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                yield from _dotted(item, f"{before}{key}.{index}.")
        else:
            yield f"{before}{key}", value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)


def header(path: Path) -> tuple[dict[str, TensorForm], int]:
    """The tensors a safetensors file says it holds, and where its data begins. Raises CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER, size - 8):
                raise ValueError(f"its header would be {length} bytes long")
            raw = json.loads(stream.read(length), object_pairs_hook=_once)
        if not isinstance(raw, dict):
            raise ValueError("its header is no object")
        raw.pop("__metadata__", None)
        forms = msgspec.convert(raw, dict[str, TensorForm])
        _check_layout(forms, size - 8 - length)
    except (OSError, ValueError) as error:  # msgspec's and json's errors are ValueErrors
        raise CheckpointError(f"drafter {path.parent}: {path.name}: {error}", mend=_MAKE_AGAIN) from None
    return forms, 8 + length


def _check_layout(forms: Mapping[str, TensorForm], size: int) -> None:
    position = 0
    for name, form in sorted(forms.items(), key=lambda item: item[1].data_offsets):
        begin, end = form.data_offsets
        if form.dtype not in _ITEM or any(length < 0 for length in form.shape):
            raise ValueError(f"tensor {name} is {form}")
        if begin != position or end - begin != int(np.prod(form.shape, dtype=object)) * _ITEM[form.dtype]:
            raise ValueError(f"tensor {name} lies at {begin} to {end}, which does not fit {form}")
        position = end
    if position != size:
        raise ValueError(f"it holds {size} bytes of tensors, its header names {position}")


def _check_same_tensors(version: str, found: Mapping[str, TensorForm], wanted: Mapping[str, TensorForm]) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            raise CheckpointError(f"drafter {version} lacks tensor {name} ({wanted[name]})", mend=_MAKE_AGAIN)
        if name not in wanted:
            raise CheckpointError(f"drafter {version} has tensor {name}, unknown to the engine", mend=_RESTART)
        have, want = found[name], wanted[name]
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            raise CheckpointError(f"drafter {version}: tensor {name} is {have}, expected {want}", mend=_RESTART)


def _check_values(path: Path, forms: Mapping[str, TensorForm], start: int, rows: int) -> str:
    """Read the file once, in pieces: finite numbers, ids within the target's rows. Returns its sha256."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            _read(stream, start, digest)
            for name, form in sorted(forms.items(), key=lambda item: item[1].data_offsets):
                if name == "d2t":
                    _check_ids(_read(stream, form.data_offsets[1] - form.data_offsets[0], digest), form, rows)
                    continue
                left = form.data_offsets[1] - form.data_offsets[0]
                while left:
                    piece = _read(stream, min(left, _PIECE), digest)
                    _check_finite(name, piece, form)
                    left -= len(piece)
            digest.update(stream.read())
    except (OSError, EOFError) as error:
        raise CheckpointError(f"drafter {path.parent}: {path.name}: {error}", mend=_MAKE_AGAIN) from None
    return digest.hexdigest()


def _read(stream: BinaryIO, length: int, digest: Any) -> bytes:
    data = stream.read(length)
    if len(data) != length:
        raise EOFError(f"ends {length - len(data)} bytes early")
    digest.update(data)
    return data


def _check_finite(name: str, piece: bytes, form: TensorForm) -> None:
    if form.dtype not in _EXPONENT:
        return
    word, exponent = _EXPONENT[form.dtype]
    if np.any((np.frombuffer(piece, word) & word(exponent)) == exponent):
        raise CheckpointError(f"drafter tensor {name} holds NaN or infinity", mend=_MAKE_AGAIN)


def _check_ids(data: bytes, form: TensorForm, rows: int) -> None:
    if form.dtype != "I64" or len(form.shape) != 1:
        raise CheckpointError(f"drafter tensor d2t is {form}, expected I64 [draft vocabulary]", mend=_MAKE_AGAIN)
    offsets = np.frombuffer(data, np.int64)
    ids = offsets + np.arange(len(offsets))
    wrong = np.flatnonzero((ids < 0) | (ids >= rows))
    if len(wrong):
        index = int(wrong[0])
        raise CheckpointError(
            f"drafter tensor d2t maps draft id {index} to token {int(ids[index])}, the target has {rows}",
            mend=_MAKE_AGAIN,
        )
    if len(np.unique(ids)) != len(ids):
        raise CheckpointError("drafter tensor d2t maps two draft ids to one token", mend=_MAKE_AGAIN)

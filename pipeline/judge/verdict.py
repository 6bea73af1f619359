"""The signed verdict: the only thing that lets a drafter's weights into an engine.

A document is plain JSON values: what was judged (digest, target, snapshot, champion, job), the decision, its evidence,
the time, and an Ed25519 signature over the canonical JSON of everything else. Decisions: "passed" and "refused" come
from the gate; "override" is a person's, made from a refused verdict, and carries who and why.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from draftloop.pipeline.errors import ConfigError, InputError, StorageError, SwapRefusedError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.judge.gate import Verdict
from draftloop.pipeline.signature import FORMAT, canonical, check_signature, digest_of_target, key_id


def sign(
    verdict: Verdict,
    *,
    digest: str,
    fingerprint: Fingerprint | str,
    snapshot_id: str,
    champion_digest: str | None,
    job_key: str,
    key: Ed25519PrivateKey,
    time_ms: int | None = None,
) -> dict[str, Any]:
    """A signed document of a gate's decision, passed or refused alike. digest: of the challenger's folder;
    fingerprint: of the target, or its digest.

    time_ms: Unix milliseconds, None for now. Raises InputError for evidence about another drafter, champion, target or
    snapshot.
    """
    target = digest_of_target(fingerprint)
    claims = {
        "drafter": (digest, verdict.challenger_digest),
        "champion": (champion_digest, verdict.champion_digest),
        "target": (target, verdict.target),
        "snapshot": (snapshot_id, verdict.snapshot_id),
    }
    for name, (claimed, judged) in claims.items():
        if claimed != judged:
            raise InputError(
                f"the verdict judged {name} {judged}, it cannot be signed for {claimed}",
                mend="replay and gate exactly what is to be registered",
            )
    body = {
        "format": FORMAT,
        "digest": digest,
        "fingerprint": target,
        "snapshot_id": snapshot_id,
        "champion_digest": champion_digest,
        "job_key": job_key,
        "decision": "passed" if verdict.passed else "refused",
        "override": None,
        "evidence": json.loads(msgspec.json.encode(verdict)),
        "time_ms": _now(time_ms),
    }
    return _signed(body, key)


def override(
    document: Mapping[str, Any], *, by: str, reason: str, key: Ed25519PrivateKey, time_ms: int | None = None
) -> dict[str, Any]:
    """A person's decision to apply a refused challenger: the same document and evidence, marked with who and why.

    Raises SwapRefusedError for a document that this key did not sign or that was not refused, InputError for a blank
    name or reason.
    """
    check_signature(document, key.public_key())
    if document["decision"] != "refused":
        raise SwapRefusedError(
            f"verdict of {document['job_key']} is {document['decision']!r}: only a refused one can be overridden"
        )
    if not by.strip() or not reason.strip():
        raise InputError(
            f"override by {by!r} because {reason!r}: both must say something", mend="name the person and the reason"
        )
    body = {name: value for name, value in document.items() if name != "signature"}
    body |= {
        "decision": "override",
        "override": {"by": by.strip(), "reason": reason.strip(), "refused_at_ms": document["time_ms"]},
        "time_ms": _now(time_ms),
    }
    return _signed(body, key)


def describe(document: Mapping[str, Any]) -> str:
    """One line for people; an override says so first."""
    evidence = document["evidence"]
    comparison = evidence["comparison"]
    line = (
        f"{document['decision']}: tau {evidence['challenger_tau']:.3f} against {evidence['champion_tau']:.3f}, "
        f"ratio {comparison['ratio']:.3f} ({comparison['low']:.3f} to {comparison['high']:.3f})"
    )
    if document["override"]:
        line = f"OVERRIDE by {document['override']['by']}: {document['override']['reason']} [the gate refused; {line}]"
    return line


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    """The signing key in a PEM file of mode 0600, made once; the public key stands beside it as `<name>.pub`.

    Raises ConfigError for a file others can read or that holds no Ed25519 key, StorageError if it cannot be written.
    """
    try:
        if not path.exists():
            _make_key(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        raw = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"signing key {path}: {error}", mend="make the folder writable for this user only"
        ) from error
    if mode & 0o077:
        raise ConfigError(
            f"signing key {path} has mode {mode:04o}: others can use it", mend=f"chmod 600 {path}, or make a new key"
        )
    try:
        key = load_pem_private_key(raw, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{path} holds no usable private key: {error}", mend="move it away: a new key is then made"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"{path} holds a {type(key).__name__}, not an Ed25519 key", mend="move it away: a new key is then made"
        )
    public = public_key_path(path)
    if not public.exists():
        _write_public(public, key)
    return key


def public_key(key: Ed25519PrivateKey) -> Ed25519PublicKey:
    """The half that agents hold."""
    return key.public_key()


def public_key_path(path: Path) -> Path:
    """Where the public half of a signing key stands."""
    return path.with_name(f"{path.name}.pub")


def _now(time_ms: int | None) -> int:
    return int(time.time() * 1000) if time_ms is None else time_ms


def _signed(body: dict[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    value = base64.b64encode(key.sign(canonical(body))).decode()
    return {**body, "signature": {"algorithm": "Ed25519", "key_id": key_id(key.public_key()), "value": value}}


def _make_key(path: Path) -> None:
    """Write beside and link: of two makers one wins, and nobody ever sees half a key or a wide mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mkstemp makes 0600
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            stream.flush()
            os.fsync(stream.fileno())
        os.link(beside, path)
    except FileExistsError:
        return  # the other maker won: its key is the key
    finally:
        os.unlink(beside)
    _write_public(public_key_path(path), key)


def _write_public(path: Path, key: Ed25519PrivateKey) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    os.replace(beside, path)

"""The signed verdict: the only thing that lets a drafter's weights into an engine.

A document is plain JSON values: what was judged (digest, target, snapshot, champion, job), the decision, its evidence,
the time, and an Ed25519 signature over the canonical JSON of everything else. Decisions: "passed" and "refused" come
from the gate; "override" is a person's, made from a refused verdict, and carries who and why.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from draftloop.pipeline.errors import ConfigError, InputError, StorageError, SwapRefusedError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.judge.gate import Verdict

FORMAT = "draftloop-verdict-1"
APPLICABLE = frozenset({"passed", "override"})
_FIELDS = frozenset(
    {"format", "digest", "fingerprint", "snapshot_id", "champion_digest", "job_key", "decision", "override", "evidence"}
) | {"time_ms", "signature"}
_MEND = "apply a registry version with its own signed verdict; make one with `draftloop gate`"


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
    target = _digest_of(fingerprint)
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
    _check_signature(document, key.public_key())
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


def check(
    document: Mapping[str, Any], public_key: Ed25519PublicKey, *, digest: str, fingerprint: Fingerprint | str
) -> None:
    """Raise SwapRefusedError naming what differs unless the document lets exactly this drafter onto this target."""
    _check_signature(document, public_key)
    if document["digest"] != digest:
        raise SwapRefusedError(f"verdict is for drafter {document['digest']}, this one is {digest}", mend=_MEND)
    serving = _digest_of(fingerprint)
    if document["fingerprint"] != serving:
        raise SwapRefusedError(
            f"verdict is for target {document['fingerprint']}, the engine serves {serving}",
            mend="retrain and judge for the target that serves",
        )
    if document["decision"] not in APPLICABLE:
        reasons = "; ".join(document["evidence"]["reasons"])
        raise SwapRefusedError(
            f"verdict is {document['decision']!r}: {reasons}", mend="train a better challenger, or keep the champion"
        )


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


def load_public_key(path: Path) -> Ed25519PublicKey:
    """The public key an agent trusts. Raises ConfigError."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"no public key in {path}: {error}", mend="copy the .pub file from where verdicts are signed"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} holds a {type(key).__name__}, not an Ed25519 key", mend="copy the .pub file again")
    return key


def public_key(key: Ed25519PrivateKey) -> Ed25519PublicKey:
    """The half that agents hold."""
    return key.public_key()


def public_key_path(path: Path) -> Path:
    """Where the public half of a signing key stands."""
    return path.with_name(f"{path.name}.pub")


def key_id(public_key: Ed25519PublicKey) -> str:
    """Short name of a key: 16 hex digits of the sha256 of its raw bytes."""
    return hashlib.sha256(public_key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:16]


def canonical(body: Mapping[str, Any]) -> bytes:
    """The bytes that are signed: sorted keys, no spaces, ASCII. Raises ValueError for NaN or infinity."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _digest_of(fingerprint: Fingerprint | str) -> str:
    return fingerprint if isinstance(fingerprint, str) else fingerprint.digest


def _now(time_ms: int | None) -> int:
    return int(time.time() * 1000) if time_ms is None else time_ms


def _signed(body: dict[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    value = base64.b64encode(key.sign(canonical(body))).decode()
    return {**body, "signature": {"algorithm": "Ed25519", "key_id": key_id(key.public_key()), "value": value}}


def _check_signature(document: Mapping[str, Any], public_key: Ed25519PublicKey) -> None:
    """Nothing in the document is believed before this passed."""
    signature = document.get("signature")
    if not isinstance(signature, Mapping) or not isinstance(signature.get("value"), str):
        raise SwapRefusedError("verdict is unsigned", mend=_MEND)
    if signature.get("algorithm") != "Ed25519":
        raise SwapRefusedError(f"verdict is signed with {signature.get('algorithm')!r}, not Ed25519", mend=_MEND)
    trusted = key_id(public_key)
    if signature.get("key_id") != trusted:
        raise SwapRefusedError(
            f"verdict is signed by key {signature.get('key_id')}, this agent trusts {trusted}",
            mend="install the signer's public key, if it is yours",
        )
    body = {name: value for name, value in document.items() if name != "signature"}
    try:
        public_key.verify(base64.b64decode(signature["value"], validate=True), canonical(body))
    except (InvalidSignature, binascii.Error, ValueError, TypeError) as error:
        raise SwapRefusedError(
            "verdict was altered after it was signed, or its signature is wrong", mend=_MEND
        ) from error
    if document.get("format") != FORMAT or document.keys() != _FIELDS:
        raise SwapRefusedError(f"verdict has format {document.get('format')!r}, expected {FORMAT!r}", mend=_MEND)


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

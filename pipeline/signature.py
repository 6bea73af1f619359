"""Is a verdict signed by whom we trust, and for exactly this drafter on this target?

Needs neither torch nor the judge, so that the plug-in in an engine process asks the same question as the agent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from draftloop.pipeline.errors import ConfigError, SwapRefusedError
from draftloop.pipeline.fingerprint import Fingerprint

FORMAT = "draftloop-verdict-1"
APPLICABLE = frozenset({"passed", "override"})
_FIELDS = frozenset(
    {"format", "digest", "fingerprint", "snapshot_id", "champion_digest", "job_key", "decision", "override", "evidence"}
) | {"time_ms", "signature"}
_MEND = "apply a registry version with its own signed verdict; make one with `draftloop gate`"


def check(
    document: Mapping[str, Any], public_key: Ed25519PublicKey, *, digest: str, fingerprint: Fingerprint | str
) -> None:
    """Raise SwapRefusedError naming what differs unless the document lets exactly this drafter onto this target."""
    check_signature(document, public_key)
    if document["digest"] != digest:
        raise SwapRefusedError(f"verdict is for drafter {document['digest']}, this one is {digest}", mend=_MEND)
    serving = digest_of_target(fingerprint)
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


def key_id(public_key: Ed25519PublicKey) -> str:
    """Short name of a key: 16 hex digits of the sha256 of its raw bytes."""
    return hashlib.sha256(public_key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:16]


def canonical(body: Mapping[str, Any]) -> bytes:
    """The bytes that are signed: sorted keys, no spaces, ASCII. Raises ValueError for NaN or infinity."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest_of_target(fingerprint: Fingerprint | str) -> str:
    """The digest of a fingerprint, or the digest given."""
    return fingerprint if isinstance(fingerprint, str) else fingerprint.digest


def check_signature(document: Mapping[str, Any], public_key: Ed25519PublicKey) -> None:
    """Raise SwapRefusedError unless this key signed exactly this document: nothing in it is believed before."""
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

"""The signed verdict: what passes, and every way in which it must not."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from draftloop.pipeline import signature
from draftloop.pipeline.errors import ConfigError, InputError, SwapRefusedError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.judge import verdict as v
from draftloop.pipeline.judge.gate import Verdict
from draftloop.pipeline.judge.statistics import Comparison

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key()
DIGEST, TARGET = "d" * 64, "0123456789abcdef"


def made(passed: bool = True, *, target: str = TARGET) -> Verdict:
    comparison = Comparison(
        ratio=1.1 + 0.2,
        low=1.05,
        high=1.5,
        confidence=0.95,
        sd=0.1,
        num_conversations=40,
        num_tokens=9000,
        minimum_detectable=1e-17,
    )
    return Verdict(
        passed=passed,
        reasons=("tau rose é",),
        checks=(),
        comparison=comparison,
        slices=(),
        challenger="challenger",
        champion="none",
        challenger_tau=1.3,
        champion_tau=1.0,
        challenger_digest=DIGEST,
        champion_digest=None,
        target=target,
        snapshot_id="s1",
        k=4,
        config={"margin": 0.01},
    )


def signed(passed: bool = True, *, time_ms: int | None = 5, key: Ed25519PrivateKey = KEY) -> dict[str, Any]:
    return v.sign(
        made(passed),
        digest=DIGEST,
        fingerprint=TARGET,
        snapshot_id="s1",
        champion_digest=None,
        job_key="job",
        key=key,
        time_ms=time_ms,
    )


def check(document: Any, **changes: Any) -> None:
    signature.check(
        document, changes.pop("public_key", PUBLIC), **({"digest": DIGEST, "fingerprint": TARGET} | changes)
    )


def test_a_passed_verdict_is_accepted_also_after_any_json_round_trip() -> None:
    check(signed())
    check(json.loads(json.dumps(signed(), indent=3)))
    check(json.loads(json.dumps(signed(), sort_keys=True, ensure_ascii=False)))


def test_the_document_says_what_was_judged_and_when() -> None:
    document = signed()
    assert {key: document[key] for key in ("digest", "fingerprint", "snapshot_id", "champion_digest", "job_key")} == {
        "digest": DIGEST,
        "fingerprint": TARGET,
        "snapshot_id": "s1",
        "champion_digest": None,
        "job_key": "job",
    }
    assert (document["decision"], document["override"], document["time_ms"]) == ("passed", None, 5)
    assert document["evidence"]["comparison"]["low"] == 1.05
    assert signed(time_ms=None)["time_ms"] > 1_700_000_000_000
    assert v.describe(document) == "passed: tau 1.300 against 1.000, ratio 1.300 (1.050 to 1.500)"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [path]


@pytest.mark.parametrize("path", leaves(signed()), ids=lambda path: ".".join(map(str, path)))
def test_no_single_value_can_be_altered(path: tuple[Any, ...]) -> None:
    document = copy.deepcopy(signed())
    inner: Any = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = "refused" if path == ("decision",) else "something else"
    with pytest.raises(SwapRefusedError):
        check(document)


@pytest.mark.parametrize("name", sorted(signed()))
def test_no_field_can_be_removed(name: str) -> None:
    document = signed()
    del document[name]
    with pytest.raises(SwapRefusedError):
        check(document)


def test_a_field_cannot_be_added() -> None:
    with pytest.raises(SwapRefusedError, match="altered"):
        check(signed() | {"force": True})


@given(flip=st.integers(0, 511))
def test_no_bit_of_the_signature_can_be_flipped(flip: int) -> None:
    import base64

    document = copy.deepcopy(signed())
    raw = bytearray(base64.b64decode(document["signature"]["value"]))
    raw[flip // 8] ^= 1 << flip % 8
    document["signature"]["value"] = base64.b64encode(raw).decode()
    with pytest.raises(SwapRefusedError, match="altered"):
        check(document)


def test_refusals_name_what_differs() -> None:
    with pytest.raises(SwapRefusedError, match="unsigned"):
        check({name: value for name, value in signed().items() if name != "signature"})
    with pytest.raises(SwapRefusedError, match="unsigned"):
        check({})
    with pytest.raises(SwapRefusedError, match=f"is for drafter {DIGEST}, this one is other"):
        check(signed(), digest="other")
    with pytest.raises(SwapRefusedError, match=f"is for target {TARGET}, the engine serves other"):
        check(signed(), fingerprint="other")
    with pytest.raises(SwapRefusedError, match="'refused': tau rose"):
        check(signed(passed=False))
    stranger = Ed25519PrivateKey.generate()
    with pytest.raises(
        SwapRefusedError, match=f"signed by key {signature.key_id(stranger.public_key())}, this agent trusts"
    ):
        check(signed(key=stranger))
    other_algorithm = copy.deepcopy(signed())
    other_algorithm["signature"]["algorithm"] = "none"
    with pytest.raises(SwapRefusedError, match="signed with 'none'"):
        check(other_algorithm)


def test_a_stranger_cannot_pass_as_the_trusted_key_by_naming_it() -> None:
    document = copy.deepcopy(signed(key=Ed25519PrivateKey.generate()))
    document["signature"]["key_id"] = signature.key_id(PUBLIC)
    with pytest.raises(SwapRefusedError, match="altered"):
        check(document)


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"digest": "e"}, f"judged drafter {DIGEST}, it cannot be signed for e"),
        ({"champion_digest": "c"}, "judged champion None, it cannot be signed for c"),
        ({"fingerprint": "f"}, f"judged target {TARGET}, it cannot be signed for f"),
        ({"snapshot_id": "s2"}, "judged snapshot s1, it cannot be signed for s2"),
    ],
)
def test_evidence_about_something_else_is_not_signed(claim: dict[str, str], message: str) -> None:
    names = {"digest": DIGEST, "fingerprint": TARGET, "snapshot_id": "s1", "champion_digest": None, "job_key": "job"}
    with pytest.raises(InputError, match=message):
        v.sign(made(), key=KEY, **(names | claim))


def test_a_person_may_override_a_refusal_and_is_named() -> None:
    refused = signed(passed=False)
    document = v.override(refused, by=" ana ", reason="canary showed +20%", key=KEY, time_ms=9)
    check(document)
    assert document["decision"] == "override"
    assert document["override"] == {"by": "ana", "reason": "canary showed +20%", "refused_at_ms": 5}
    assert document["evidence"] == refused["evidence"]
    assert v.describe(document).startswith("OVERRIDE by ana: canary showed +20% [the gate refused; ")


@pytest.mark.parametrize(("by", "reason"), [("", "why"), ("ana", " "), ("  ", "")])
def test_an_override_without_a_name_or_reason_is_refused(by: str, reason: str) -> None:
    with pytest.raises(InputError, match="must say something"):
        v.override(signed(passed=False), by=by, reason=reason, key=KEY)


def test_only_a_refused_verdict_of_the_same_key_can_be_overridden() -> None:
    with pytest.raises(SwapRefusedError, match="'passed'"):
        v.override(signed(), by="ana", reason="why", key=KEY)
    with pytest.raises(SwapRefusedError, match="trusts"):
        v.override(signed(passed=False), by="ana", reason="why", key=Ed25519PrivateKey.generate())
    twice = v.override(signed(passed=False), by="ana", reason="why", key=KEY)
    with pytest.raises(SwapRefusedError, match="'override'"):
        v.override(twice, by="ben", reason="why", key=KEY)


def test_a_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "gate.key"
    key = v.load_or_make_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = v.load_or_make_key(path)
    assert signature.key_id(again.public_key()) == signature.key_id(key.public_key())
    assert signature.key_id(signature.load_public_key(v.public_key_path(path))) == signature.key_id(v.public_key(key))
    assert sorted(item.name for item in path.parent.iterdir()) == ["gate.key", "gate.key.pub"]


def test_a_lost_public_key_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "gate.key"
    key = v.load_or_make_key(path)
    v.public_key_path(path).unlink()
    v.load_or_make_key(path)
    assert signature.key_id(signature.load_public_key(v.public_key_path(path))) == signature.key_id(key.public_key())


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gate.key"
    v.load_or_make_key(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640.*\n.*chmod 600"):
        v.load_or_make_key(path)


def test_a_file_that_is_no_key_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "gate.key"
    path.write_bytes(b"nonsense")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="no usable private key"):
        v.load_or_make_key(path)
    assert path.read_bytes() == b"nonsense"
    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(other)
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        v.load_or_make_key(path)
    with pytest.raises(ConfigError, match="no public key"):
        signature.load_public_key(path)
    with pytest.raises(ConfigError, match="no public key"):
        signature.load_public_key(tmp_path / "missing.pub")


def test_of_two_makers_one_key_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gate.key"
    winner: list[Ed25519PrivateKey] = []
    real = os.link

    def beaten(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "link", real)
        winner.append(v.load_or_make_key(path))
        real(source, target)

    monkeypatch.setattr(os, "link", beaten)
    loser = v.load_or_make_key(path)
    assert signature.key_id(loser.public_key()) == signature.key_id(winner[0].public_key())
    assert sorted(item.name for item in tmp_path.iterdir()) == ["gate.key", "gate.key.pub"]


def test_not_a_number_is_never_signed() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        signature.canonical({"ratio": float("nan")})


def test_a_fingerprint_and_its_digest_are_the_same_target() -> None:
    whole = Fingerprint(
        weights_digest="w",
        tokenizer_digest="t",
        template_digest="c",
        vocab_size=131,
        padded_vocab_size=136,
        hidden_size=32,
        num_layers=4,
        tap_layers=(1, 2, 3),
        dtype="float32",
        quantization="none",
        max_position_embeddings=512,
        rope_theta=1e4,
    )
    names = {"digest": DIGEST, "snapshot_id": "s1", "champion_digest": None, "job_key": "job", "time_ms": 5}
    document = v.sign(made(target=whole.digest), key=KEY, fingerprint=whole, **names)
    assert document == v.sign(made(target=whole.digest), key=KEY, fingerprint=whole.digest, **names)
    check(document, fingerprint=whole)
    with pytest.raises(SwapRefusedError, match="is for target"):
        check(document, fingerprint=dataclasses.replace(whole, weights_digest="x"))

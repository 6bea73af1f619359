"""What must hold of a drafter before an engine is touched, from its files alone."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dflash_folder import publish_dflash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import FINGERPRINT

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import CheckpointError, InputError, SwapRefusedError
from draftloop.pipeline.signature import FORMAT, canonical, key_id
from draftloop.serving_hooks.vllm import checks
from draftloop.serving_hooks.vllm.checks import Boot, Rules, check_version, read_boot

TARGET = replace(FINGERPRINT, padded_vocab_size=4096, vocab_size=4000, hidden_size=32)


class Site(NamedTuple):
    rules: Rules
    boot: Boot
    key: Ed25519PrivateKey

    def place(self, version: str) -> Path:
        return self.rules.staging / version

    def sign(self, version: str, digest: str) -> None:
        body: dict[str, Any] = dict.fromkeys(("snapshot_id", "champion_digest", "job_key", "override"), "x")
        body |= {"format": FORMAT, "digest": digest, "fingerprint": TARGET.digest, "decision": "passed"}
        body |= {"evidence": {"reasons": []}, "time_ms": 1}
        value = base64.b64encode(self.key.sign(canonical(body))).decode()
        signature = {"algorithm": "Ed25519", "key_id": key_id(self.key.public_key()), "value": value}
        artifact.write_json(self.rules.staging.parent / "verdicts" / f"{version}.json", body | {"signature": signature})

    def check(self, version: str = "2", digest: str | None = None) -> checks.Checked:
        found = digest or (self.place(version) / artifact.MARKER).read_text()
        return check_version(version, found, self.boot, self.rules)

    def seal_again(self, version: str) -> None:
        """As whoever damaged it before it was sealed would have sealed it."""
        folder = self.place(version)
        manifest = json.loads((folder / artifact.MANIFEST).read_text())
        moved = folder.with_name("moved")
        folder.rename(moved)
        for name in (artifact.MANIFEST, artifact.MARKER):
            (moved / name).unlink()
        artifact.publish(moved, folder, manifest)
        self.sign(version, (folder / artifact.MARKER).read_text())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    key = Ed25519PrivateKey.generate()
    staging = tmp_path / "drafters"
    rules = Rules(staging, TARGET, 2**20, key.public_key())
    publish_dflash(staging / "boot", TARGET, seed=1)
    made = Site(rules, read_boot(staging / "boot"), key)
    made.sign("2", publish_dflash(staging / "2", TARGET, seed=2))
    return made


def test_a_good_version_is_described_as_its_manifest_does(site: Site) -> None:
    checked = site.check()
    manifest = json.loads((site.place("2") / artifact.MANIFEST).read_text())
    assert checked.version == "2"
    assert checked.tensors == manifest["tensor_digest"]
    assert checked.sha256 == manifest["files"]["model.safetensors"]
    assert checked.weights == site.place("2") / "model.safetensors"


def test_the_drafter_of_the_start_needs_no_verdict(site: Site) -> None:
    shutil.copytree(site.place("boot"), site.place("old"))
    assert site.check("old").digest == site.boot.digest


def test_without_a_public_key_only_the_drafter_of_the_start_gets_in(site: Site) -> None:
    closed = site._replace(rules=replace(site.rules, public_key=None))
    assert closed.check("boot").version == "boot"
    with pytest.raises(SwapRefusedError, match="no public key is set"):
        closed.check("2")


def test_a_drafter_larger_than_allowed_is_refused_before_it_is_read(site: Site) -> None:
    small = site._replace(rules=replace(site.rules, max_bytes=1000))
    with pytest.raises(CheckpointError, match="at most 1000 are read"):
        small.check()


def test_a_link_inside_a_folder_is_refused(site: Site) -> None:
    weights = site.place("2") / "model.safetensors"
    weights.rename(site.place("2").parent / "elsewhere")
    weights.symlink_to(site.place("2").parent / "elsewhere")
    with pytest.raises(CheckpointError, match="is no plain file"):
        site.check()


def test_a_folder_in_a_folder_is_refused(site: Site) -> None:
    (site.place("2") / "more").mkdir()
    with pytest.raises(CheckpointError, match="more is no plain file"):
        site.check()


@pytest.mark.parametrize("version", ["..", ".", "", "a/b", "/a", "2\n", "-", "._", "é"])
def test_only_plain_versions_are_looked_up(version: str, site: Site) -> None:
    with pytest.raises(InputError, match="is no plain version"):
        site.check(version, "0" * 64)


def twice(header: bytes) -> bytes:
    return header.replace(b'"norm.weight"', b'"hidden_norm.weight"')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda header: header[: len(header) // 2], "model.safetensors: "),
        (lambda header: b"[]", "its header is no object"),
        (lambda header: b"{}", "its header names 0"),
        (twice, "a name stands twice"),
        (lambda header: header.replace(b"BF16", b"BF17", 1), "is BF17"),
        (lambda header: header.replace(b"[32,96]", b"[32,-6]", 1), "is BF16"),
        (lambda header: header.replace(b"[32,96]", b"[32,97]", 1), "which does not fit"),
    ],
)
def test_a_header_that_lies_is_refused(change: Callable[[bytes], bytes], said: str, site: Site) -> None:
    path = site.place("2") / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length])
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    site.seal_again("2")
    with pytest.raises(CheckpointError, match=said):
        site.check()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 3000), st.binary(min_size=1, max_size=12))
def test_whatever_stands_in_the_file_only_named_errors_come_out(site: Site, at: int, noise: bytes) -> None:
    path = site.place("2") / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:at] + noise + good[at + len(noise) :])
    try:
        site.seal_again("2")
        with suppress(CheckpointError):
            site.check()
    finally:
        path.write_bytes(good)

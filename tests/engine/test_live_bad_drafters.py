"""Whatever is wrong with a drafter or its verdict, a running engine refuses it by name and serves on as before."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from live_site import LiveServer, TinySite
from staged_drafters import Draft, resign, restage
from stopped import resume_workers, stopped_workers, wait_until

pytestmark = pytest.mark.engine
BAD = "bad"


def no_such(site: TinySite) -> None:
    shutil.rmtree(site.place(BAD), ignore_errors=True)


def empty(site: TinySite) -> None:
    no_such(site)
    site.place(BAD).mkdir()


def a_link(site: TinySite) -> None:
    no_such(site)
    site.place(BAD).symlink_to(site.place("2"))


def of_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[TinySite], None]:
    return lambda site: void(restage(site, BAD, lambda draft: void(change(draft.tensors))))


def of_draft(change: Callable[[Draft], object]) -> Callable[[TinySite], None]:
    return lambda site: void(restage(site, BAD, lambda draft: void(change(draft))))


def of_folder(change: Callable[[Path], object]) -> Callable[[TinySite], None]:
    return lambda site: void(restage(site, BAD, after=lambda folder: void(change(folder))))


def of_sealed(change: Callable[[Path], object]) -> Callable[[TinySite], None]:
    return lambda site: void(change(restage(site, BAD)))


def of_verdict(change: Callable[[TinySite, Path], object]) -> Callable[[TinySite], None]:
    def stage(site: TinySite) -> None:
        restage(site, BAD)
        change(site, site.verdict_file(BAD))

    return stage


def void(value: object) -> None:
    """Whatever a change returns does not matter."""


def set_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][3] = float("nan")


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - size)


def flip(path: Path) -> None:
    """Other weights of the same form, as a file that is all right by itself."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document))


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def other_k(draft: Draft) -> None:
    draft.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 3


def header_of(path: Path, length: int) -> None:
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


CASES: dict[str, tuple[Callable[[TinySite], None], str, str]] = {
    "wrong shape": (
        of_tensors(lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1].contiguous()})),
        "CheckpointError",
        "tensor fc.weight is BF16 [64, 191], expected BF16 [64, 192]",
    ),
    "missing tensor": (
        of_tensors(lambda t: t.pop("layers.0.mlp.down_proj.weight")),
        "CheckpointError",
        "lacks tensor layers.0.mlp.down_proj.weight",
    ),
    "no d2t": (of_tensors(lambda t: t.pop("d2t")), "CheckpointError", "lacks tensor d2t"),
    "extra tensor": (
        of_tensors(lambda t: t.update({"embed_tokens.weight": torch.zeros(2, 2)})),
        "CheckpointError",
        "has tensor embed_tokens.weight, unknown to the engine",
    ),
    "wrong dtype": (
        of_tensors(lambda t: t.update({"norm.weight": t["norm.weight"].float()})),
        "CheckpointError",
        "tensor norm.weight is F32 [64], expected BF16 [64]",
    ),
    "empty folder": (empty, "CheckpointError", "has no COMPLETE marker"),
    "absent folder": (no_such, "CheckpointError", "no drafter at"),
    "link": (a_link, "InputError", "is a link"),
    "NaN": (of_tensors(set_nan), "CheckpointError", "tensor norm.weight holds NaN or infinity"),
    "infinity": (
        of_tensors(lambda t: t["fc.weight"].view(-1)[5:6].fill_(float("-inf"))),
        "CheckpointError",
        "tensor fc.weight holds NaN or infinity",
    ),
    "other target": (
        of_draft(lambda draft: draft.manifest["fingerprint"].update(weights_digest="0" * 64)),
        "FingerprintMismatchError",
        "weights_digest",
    ),
    "other tap layers": (
        of_draft(lambda draft: draft.manifest["fingerprint"].update(tap_layers=[0, 1, 2])),
        "FingerprintMismatchError",
        "tap_layers",
    ),
    "other tap layers in its config": (
        of_draft(lambda draft: draft.config.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2])),
        "SwapRefusedError",
        "eagle_aux_hidden_state_layer_ids is [0, 1, 2], the engine was started with [1, 2, 3]",
    ),
    "other number of speculated tokens": (of_draft(other_k), "SwapRefusedError", "speculative_tokens is 3"),
    "other norm": (
        of_draft(lambda draft: draft.config.pop("norm_before_residual")),
        "SwapRefusedError",
        "norm_before_residual is 'nothing', the engine was started with False",
    ),
    "other family": (
        of_draft(lambda draft: draft.manifest.update(family="dflash")),
        "SwapRefusedError",
        "of family 'dflash'",
    ),
    "a pickle beside it": (
        of_folder(lambda folder: (folder / "mask_embedding.pt").write_bytes(b"\x80\x04.")),
        "SwapRefusedError",
        "mask_embedding.pt",
    ),
    "d2t out of range": (
        of_tensors(lambda t: t["d2t"][-1:].fill_(49152)),
        "CheckpointError",
        "the target has 49152",
    ),
    "d2t negative": (of_tensors(lambda t: t["d2t"][:1].fill_(-1)), "CheckpointError", "maps draft id 0 to token -1"),
    "tensors are not the manifest's": (
        of_draft(lambda draft: draft.manifest.update(tensor_digest="0" * 64)),
        "CheckpointError",
        "its manifest names 0000",
    ),
    "cut off before it was sealed": (
        of_folder(lambda folder: cut(folder / "model.safetensors", 100)),
        "CheckpointError",
        "bytes of tensors",
    ),
    "header longer than the file": (
        of_folder(lambda folder: header_of(folder / "model.safetensors", 2**40)),
        "CheckpointError",
        "its header would be 1099511627776 bytes long",
    ),
    "truncated": (
        of_sealed(lambda folder: cut(folder / "model.safetensors", 100)),
        "CheckpointError",
        "model.safetensors was altered",
    ),
    "altered config": (
        of_sealed(lambda folder: (folder / "config.json").write_text("{}")),
        "CheckpointError",
        "config.json was altered",
    ),
    "altered manifest": (
        of_sealed(lambda folder: (folder / "manifest.json").write_text("{}")),
        "CheckpointError",
        "manifest.json is not the one its marker names",
    ),
    "no verdict": (of_verdict(lambda site, path: path.unlink()), "SwapRefusedError", "has no verdict"),
    "unsigned": (
        of_verdict(lambda site, path: rewrite(path, {k: v for k, v in read(path).items() if k != "signature"})),
        "SwapRefusedError",
        "verdict is unsigned",
    ),
    "signed by somebody else": (
        of_verdict(lambda site, path: rewrite(path, resign(site, path, key=Ed25519PrivateKey.generate()))),
        "SwapRefusedError",
        "verdict is signed by key",
    ),
    "altered verdict": (
        of_verdict(lambda site, path: rewrite(path, {**read(path), "time_ms": 1})),
        "SwapRefusedError",
        "verdict was altered",
    ),
    "verdict of another drafter": (
        of_verdict(lambda site, path: shutil.copyfile(site.verdict_file("2"), path)),
        "SwapRefusedError",
        "verdict is for drafter",
    ),
    "verdict for another target": (
        of_verdict(lambda site, path: rewrite(path, resign(site, path, fingerprint="0123456789abcdef"))),
        "SwapRefusedError",
        "verdict is for target 0123456789abcdef",
    ),
    "refused by the gate": (
        of_verdict(lambda site, path: rewrite(path, resign(site, path, decision="refused"))),
        "SwapRefusedError",
        "verdict is 'refused'",
    ),
    "verdict is no object": (
        of_verdict(lambda site, path: path.write_text("[1]")),
        "SwapRefusedError",
        "is no object",
    ),
}


@pytest.fixture(scope="module")
def before(live: LiveServer) -> Iterator[Any]:
    """What the engine serves before all of it; at the end it serves exactly that, and its target is untouched."""
    first = live.admin("/inspect", {})[1]["workers"]
    yield live.status()["drafter"]
    last = live.admin("/inspect", {})[1]["workers"]
    assert [(w["drafter"], w["differing"], w["target"]) for w in last] == [
        (w["drafter"], [], w["target"]) for w in first
    ]


def audit(live: LiveServer) -> dict[str, Any]:
    file = live.files.settings.parent / "engine-audit.jsonl"
    assert file.stat().st_mode & 0o777 == 0o600
    return dict(json.loads(file.read_text().splitlines()[-1]))


def require_refused(live: LiveServer, before: Any, answer: tuple[int, Any], kind: str, said: str) -> None:
    """Refused by name before anything was touched; the engine answers; the old drafter serves; it is written down."""
    code, body = answer
    assert (code, body["error"]["class"]) == (422, kind), body
    assert said in body["error"]["message"]
    assert body["error"]["mend"]
    assert live.complete("hello")["choices"][0]["text"]
    status = live.status()
    assert status["drafter"] == before
    assert status["restart_needed"] is None
    line = audit(live)
    assert (line["act"], line["outcome"], line["serving"]) == ("drafter.swap", "refused", before["version"])
    assert line["reason"].startswith(f"{kind}: ")
    assert said in line["reason"]


@pytest.mark.parametrize("name", CASES)
def test_a_bad_drafter_is_refused_by_name_and_the_old_one_serves_on(
    name: str, live: LiveServer, tiny: TinySite, before: Any
) -> None:
    stage, kind, said = CASES[name]
    if tiny.place(BAD).is_symlink():
        tiny.place(BAD).unlink()
    stage(tiny)
    marker = tiny.place(BAD) / "COMPLETE"
    digest = marker.read_text().strip() if marker.exists() else "0" * 64
    refused = live.status()["swaps"].get("refused", 0)
    require_refused(live, before, live.admin("/swap", {"version": BAD, "digest": digest}), kind, said)
    assert live.status()["swaps"]["refused"] == refused + 1


@pytest.mark.parametrize("version", ["../drafters/2", "/etc", "..", "", "2/", "2\x00", "a" * 65, ".2"])
def test_a_version_that_is_a_path_is_refused(version: str, live: LiveServer, tiny: TinySite, before: Any) -> None:
    answer = live.admin("/swap", {"version": version, "digest": tiny.digest("2")})
    require_refused(live, before, answer, "InputError", "is no plain version")


def test_another_digest_than_the_one_asked_for_is_refused(live: LiveServer, tiny: TinySite, before: Any) -> None:
    answer = live.admin("/swap", {"version": "2", "digest": tiny.digest("3")})
    require_refused(live, before, answer, "SwapRefusedError", f"asked for was {tiny.digest('3')}")


@pytest.mark.parametrize(
    "body",
    [{}, {"version": "2"}, {"version": 2, "digest": ""}, {"version": "2", "digest": "x", "path": "/"}, [], "x" * 9000],
)
def test_a_malformed_request_is_refused(body: object, live: LiveServer, before: Any) -> None:
    require_refused(live, before, live.admin("/swap", body), "InputError", "the body")


def test_a_file_changed_between_check_and_load_is_refused_before_anything_is_touched(
    live: LiveServer, tiny: TinySite, before: Any
) -> None:
    """The API process has read and checked the file; the worker, stopped meanwhile, reads another."""
    weights = restage(tiny, BAD) / "model.safetensors"
    with stopped_workers(live), ThreadPoolExecutor() as pool:
        answer = pool.submit(live.admin, "/swap", {"version": BAD, "digest": tiny.digest(BAD)})
        wait_until(lambda: bool(live.status()["swapping"]))
        time.sleep(1.0)  # the checks take some 20 ms; after them only the worker is waited for
        flip(weights)
        resume_workers(live)
        require_refused(live, before, answer.result(), "CheckpointError", "was changed between check and load")

"""DFlash drafters are swapped in place: exact weights, and tensors derived from them stay where a graph reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dflash_folder import BLOCK, publish_dflash
from live_site import LiveServer, TinySite, make_server
from staged_drafters import resign, restage

from draftloop.pipeline import artifact

pytestmark = pytest.mark.engine
VERSIONS = ("dflash-a", "dflash-b")


@pytest.fixture(scope="module")
def live(engine_python: Path, tiny: TinySite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of its own: the drafter's family is fixed at its start."""
    for seed, version in enumerate(VERSIONS):
        digest = publish_dflash(tiny.place(version), tiny.fingerprint, seed=seed)
        artifact.write_json(tiny.verdict_file(version), resign(tiny, tiny.verdict_file("2"), digest=digest))
    speculation = {"method": "dflash", "model": str(tiny.place(VERSIONS[0])), "num_speculative_tokens": BLOCK - 1}
    made = make_server(
        tiny,
        engine_python,
        tmp_path_factory.mktemp("dflash"),
        extra_args=("--speculative-config", json.dumps(speculation)),  # the last one given counts
    )
    made.server.start()
    yield made
    made.server.stop()


def inspect(live: LiveServer) -> dict[str, Any]:
    code, body = live.admin("/inspect", {})
    assert code == 200, body
    return dict(body["workers"][0])


def swap(live: LiveServer, site: TinySite, version: str) -> tuple[int, Any]:
    return live.admin("/swap", {"version": version, "digest": site.digest(version)})


def test_weights_are_exact_and_derived_tensors_stay_in_place(live: LiveServer, tiny: TinySite) -> None:
    text = live.complete("hello")["choices"][0]["text"]
    first = inspect(live)
    assert (first["drafter"], first["differing"]) == (tiny.tensors(VERSIONS[0]), [])
    assert first["fused"].keys() == {"_fused_kv_weight", "_k_norm_weights"}
    for version in (VERSIONS[1], VERSIONS[0], VERSIONS[1], VERSIONS[0]):
        code, body = swap(live, tiny, version)
        assert (code, body["tensors"]) == (200, tiny.tensors(version)), body
        now = inspect(live)
        assert (now["drafter"], now["differing"]) == (tiny.tensors(version), [])
        assert now["fused"] == first["fused"]
        assert now["target"] == first["target"]
        assert live.complete("hello")["choices"][0]["text"] == text


def test_a_drafter_of_another_family_is_refused(live: LiveServer, tiny: TinySite) -> None:
    code, body = swap(live, tiny, "2")
    assert (code, body["error"]["class"]) == (422, "SwapRefusedError")
    assert "of family 'eagle3', the engine drafts with 'dflash'" in body["error"]["message"]
    assert inspect(live)["differing"] == []


def test_another_block_size_is_refused(live: LiveServer, tiny: TinySite) -> None:
    restage(tiny, "dflash-block", lambda draft: draft.config.update(block_size=16), of=VERSIONS[1])
    code, body = swap(live, tiny, "dflash-block")
    assert (code, body["error"]["class"]) == (422, "SwapRefusedError")
    assert "block_size is 16, the engine was started with 8" in body["error"]["message"]
    assert inspect(live)["differing"] == []

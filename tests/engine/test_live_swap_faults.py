"""Faults inside the engine, after every check has passed: undone while requests wait, or said so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_faults import faulty_python
from live_site import LiveServer, TinySite, make_server

from draftloop.pipeline.rollout.vllm_client import VllmClient
from draftloop.pipeline.vllm_service import wait_until_known

pytestmark = pytest.mark.engine


class Faulty(NamedTuple):
    live: LiveServer
    orders: Path

    def swap(self, version: str) -> tuple[int, Any]:
        return self.live.admin("/swap", {"version": version, "digest": self.live.site.digest(version)})

    def worker(self) -> dict[str, Any]:
        code, body = self.live.admin("/inspect", {})
        assert code == 200, body
        return dict(body["workers"][0])


@pytest.fixture(scope="module")
def server(engine_python: Path, tiny: TinySite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    python, orders = faulty_python(folder / "faults", engine_python)
    live = make_server(tiny, python, folder / "live")
    live.server.start()
    wait_until_known(VllmClient(live.url, live.files.token))
    yield Faulty(live, orders)
    live.server.stop()


@pytest.fixture
def faulty(server: Faulty) -> Iterator[Faulty]:
    yield server
    server.orders.write_text("")


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("shape:staged", "boot serves again"),
        ("finish", "told to fail at the finish"),
        ("lost:staged", "tensor lm_head.weight is not what was loaded"),
        ("column:staged", "tensor fc.weight is not what was loaded"),
    ],
)
def test_a_load_that_goes_wrong_is_undone_and_proven(order: str, said: str, faulty: Faulty) -> None:
    live = faulty.live
    before, answer = live.status()["drafter"], live.complete("hello")["choices"][0]["text"]
    target = faulty.worker()["target"]
    faulty.orders.write_text(order)
    code, body = faulty.swap("2")
    assert (code, body["error"]["class"]) == (500, "SwapFailedError"), body
    assert said in body["error"]["message"]
    assert live.complete("hello")["choices"][0]["text"] == answer
    status = live.status()
    assert status["drafter"] == before
    assert status["restart_needed"] is None
    worker = faulty.worker()
    assert (worker["drafter"], worker["differing"]) == (live.site.tensors("boot"), [])
    assert worker["target"] == target
    line = json.loads((live.files.settings.parent / "engine-audit.jsonl").read_text().splitlines()[-1])
    assert (line["outcome"], line["version"], line["serving"]) == ("failed", "2", "boot")
    faulty.orders.write_text("")
    assert faulty.swap("2")[0] == 200
    assert faulty.swap("boot")[0] == 200


def test_an_engine_woken_from_deep_sleep_drafts_with_what_served(faulty: Faulty) -> None:
    """On CPU vLLM's sleep frees nothing, so the drafter is overwritten before it wakes."""
    live = faulty.live
    assert faulty.swap("2")[0] == 200
    weights = live.site.place("3") / "model.safetensors"
    sha256 = json.loads((live.site.place("3") / "manifest.json").read_text())["files"]["model.safetensors"]
    assert live.post("/sleep?level=2&mode=keep", {})[0] == 200
    code, body = faulty.swap("3")
    assert (code, body["error"]["class"]) == (409, "SwapBusyError")
    for method, args in (("draftloop_stage", [str(weights), sha256]), ("start_draft_weight_update", [])):
        assert live.post("/collective_rpc", {"method": method, "args": args})[0] == 200
    assert live.post("/update_weights", {"update_info": {"slot": "staged"}})[0] == 200
    assert live.post("/finish_weight_update", {})[0] == 200
    code, body = live.admin("/inspect", {})  # what sleeps may have no weights to read
    assert (code, body["error"]["class"]) == (409, "SwapBusyError")
    code, body = live.post("/collective_rpc", {"method": "draftloop_differing", "args": ["serving"]})
    assert (code, body["results"][0] != []) == (200, True)
    assert live.post("/wake_up", {})[0] == 200
    worker = faulty.worker()
    assert (worker["drafter"], worker["differing"]) == (live.site.tensors("2"), [])
    assert live.complete("hello")["choices"][0]["text"]
    assert faulty.swap("boot")[0] == 200


def test_an_engine_paused_by_its_operator_is_left_alone_until_it_is_resumed(faulty: Faulty) -> None:
    live = faulty.live
    for route in ("/pause?mode=keep", "/sleep?level=0&mode=keep"):
        assert live.post(route, {})[0] == 200
        assert faulty.swap("2")[0] == 409
        assert live.admin("/inspect", {})[0] == 409
        assert live.post("/resume", {})[0] == 200
        assert live.complete("hello")["choices"][0]["text"]
    assert faulty.swap("2")[0] == 200
    assert faulty.swap("boot")[0] == 200


def test_an_engine_that_cannot_be_brought_back_says_so_and_answers_on(faulty: Faulty) -> None:
    """Only a restart helps it."""
    live = faulty.live
    answer = live.complete("hello")["choices"][0]["text"]
    faulty.orders.write_text("shape:staged shape:serving")
    code, body = faulty.swap("2")
    assert (code, body["error"]["class"]) == (503, "ReplicaLostError"), body
    assert "boot could not be brought back" in body["error"]["message"]
    assert live.admin("/health", token="") == (503, {"ok": False, "reason": body["error"]["message"]})
    status = live.status()
    assert status["restart_needed"] == body["error"]["message"]
    assert status["drafter"]["version"] is None
    assert live.complete("hello")["choices"][0]["text"] == answer
    faulty.orders.write_text("")
    code, body = faulty.swap("2")
    assert (code, body["error"]["class"]) == (503, "ReplicaLostError")


def test_an_engine_of_another_target_neither_captures_nor_swaps_and_serves_on(faulty: Faulty) -> None:
    """The same server, started again with the fingerprint of another target."""
    live = faulty.live
    live.server.stop()
    other = replace(live.site.fingerprint, hidden_size=128, template_digest="0" * 64)
    live.files.fingerprint.write_text(json.dumps(other.to_dict()))
    live.server.start()
    assert live.admin("/health", token="") == (200, {"ok": True})
    assert live.complete("hello")["choices"][0]["text"]
    status = live.status()
    assert status["trouble"]["class"] == "FingerprintMismatchError"
    assert "hidden_size: the fingerprint file has 128, this engine has 64" in status["trouble"]["message"]
    assert "template_digest" in status["trouble"]["message"]
    assert status["capture"]["capturing"] is False
    for path, body in (("/swap", {"version": "2", "digest": live.site.digest("2")}), ("/capture", {"enabled": True})):
        code, answer = live.admin(path, body)
        assert (code, answer["error"]["class"]) == (422, "FingerprintMismatchError")

"""Drafters swapped in a running engine: no request is cut, no output differs, the target is untouched."""

from __future__ import annotations

import http.client
import json
import statistics
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_site import LiveServer, TinySite
from staged_drafters import restage, shake
from stopped import resume_workers, stopped_workers, wait_until

pytestmark = pytest.mark.engine
STREAMS = 8
TOKENS = 200


@pytest.fixture(autouse=True)
def _boot_serves(live: LiveServer, tiny: TinySite) -> Iterator[None]:
    yield
    swap(live, tiny, "boot")


def swap(live: LiveServer, site: TinySite, version: str) -> dict[str, Any]:
    code, body = live.admin("/swap", {"version": version, "digest": site.digest(version)})
    assert code == 200, body
    assert isinstance(body, dict)
    return body


def inspect(live: LiveServer) -> dict[str, Any]:
    """Of the one worker, read out of what it computes with."""
    code, body = live.admin("/inspect", {})
    assert code == 200, body
    (worker,) = body["workers"]
    return dict(worker)


def prompt(index: int) -> list[int]:
    return [1000 + 17 * index, 1100 + index, 1200, 1300 + 3 * index]


def long_answer(live: LiveServer, index: int) -> list[int]:
    """Token ids of one streamed answer; it must end by length, not before."""
    body = {
        "prompt": prompt(index),
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    reason = None
    for chunk in live.stream("/v1/completions", body):
        for choice in chunk["choices"]:
            ids += choice.get("token_ids") or []
            reason = choice["finish_reason"] or reason
    assert reason == "length"
    return ids


def answers(live: LiveServer, pool: ThreadPoolExecutor) -> list[Any]:
    return [pool.submit(long_answer, live, index) for index in range(STREAMS)]


def test_swaps_under_running_requests_cut_none_and_change_no_output(live: LiveServer, tiny: TinySite) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        expected = [one.result() for one in answers(live, pool)]
        running = answers(live, pool)
        swaps = 0
        while not all(one.done() for one in running):
            swap(live, tiny, ("2", "3")[swaps % 2])
            swaps += 1
        assert [one.result() for one in running] == expected
    assert swaps >= 2
    assert all(len(ids) == TOKENS for ids in expected)


def test_there_and_back_is_exactly_the_drafter_before_on_an_untouched_target(live: LiveServer, tiny: TinySite) -> None:
    restage(tiny, "shaken", shake)
    first = inspect(live)
    assert first["drafter"] == tiny.tensors("boot")
    for version in ("shaken", "boot", "shaken", "2", "boot"):
        assert swap(live, tiny, version)["tensors"] == tiny.tensors(version)
        now = inspect(live)
        assert (now["drafter"], now["differing"]) == (tiny.tensors(version), [])
        assert now["target"] == first["target"]
        assert live.status()["drafter"]["version"] == version


def test_acceptance_is_the_swapped_in_drafters(live: LiveServer, tiny: TinySite) -> None:
    prompts = [prompt(index) for index in range(4)]

    def tau() -> float:
        code, body = live.admin("/probe", {"prompts": prompts, "max_tokens": 100})
        assert code == 200, body
        return float(body["counters"]["num_emitted"] / body["counters"]["num_steps"])

    before = tau()
    swap(live, tiny, "2")
    assert tau() > before + 0.5
    swap(live, tiny, "boot")
    assert tau() == before


def test_twenty_swaps_stop_requests_for_a_quarter_of_a_second_at_most(live: LiveServer, tiny: TinySite) -> None:
    pauses = [swap(live, tiny, ("2", "boot")[index % 2])["pause_ms"] for index in range(20)]
    assert statistics.median(pauses) <= 250


def test_a_swap_during_a_swap_is_refused(live: LiveServer, tiny: TinySite) -> None:
    with stopped_workers(live), ThreadPoolExecutor() as pool:
        first = pool.submit(swap, live, tiny, "2")
        wait_until(lambda: bool(live.status()["swapping"]))
        code, body = live.admin("/swap", {"version": "3", "digest": tiny.digest("3")})
        resume_workers(live)
        assert (code, body["error"]["class"]) == (409, "SwapBusyError")
        assert first.result()["version"] == "2"
    assert live.status()["drafter"]["version"] == "2"


def test_a_caller_that_hangs_up_in_the_middle_leaves_an_engine_that_runs_with_the_new_drafter(
    live: LiveServer, tiny: TinySite
) -> None:
    body = json.dumps({"version": "2", "digest": tiny.digest("2")})
    headers = {"authorization": f"Bearer {live.token}", "content-type": "application/json"}
    connection = http.client.HTTPConnection(live.url.removeprefix("http://"))
    with stopped_workers(live):
        connection.request("POST", "/draftloop/v1/swap", body, headers)
        wait_until(lambda: bool(live.status()["swapping"]))
        connection.close()
    wait_until(lambda: not live.status()["swapping"])
    assert live.complete("hello")["choices"][0]["text"]
    assert live.status()["drafter"]["version"] == "2"
    assert inspect(live)["differing"] == []


@pytest.mark.parametrize("token", ["", "wrong-token-of-some-length", "ü" * 20])
def test_nothing_but_health_answers_without_the_token(token: str, live: LiveServer, tiny: TinySite) -> None:
    for path, body in (("/status", None), ("/probe", {}), ("/score", {}), ("/capture", {"enabled": False})):
        assert live.admin(path, body, token=token)[0] == 401
    code, answer = live.admin("/swap", {"version": "2", "digest": tiny.digest("2")}, token=token)
    assert (code, answer["error"]["class"]) == (401, "AdminDeniedError")
    assert live.token not in json.dumps(answer)
    file = live.files.settings.parent / "engine-audit.jsonl"
    wait_until(lambda: '"denied"' in file.read_text().splitlines()[-1])  # a line a second at most
    line = json.loads(file.read_text().splitlines()[-1])
    assert (line["act"], line["outcome"], line["serving"]) == ("drafter.swap", "denied", "boot")
    assert live.admin("/health", token="") == (200, {"ok": True})


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_a_call_through_a_proxy_is_denied_though_its_token_is_right(header: str, live: LiveServer) -> None:
    code, body = live.get(
        "/draftloop/v1/status", headers={"authorization": f"Bearer {live.token}", header: "203.0.113.7"}
    )
    assert (code, body["error"]["class"]) == (403, "AdminDeniedError")


def test_the_served_version_is_a_metric(live: LiveServer, tiny: TinySite) -> None:
    swap(live, tiny, "3")
    with urllib.request.urlopen(f"{live.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("draftloop_drafter_version_info{")]
    assert 'version="3"' in line
    assert line.endswith(" 1.0")
    assert "draftloop_restart_needed 0.0" in lines


def test_score_and_probe_agree_on_what_the_target_thinks(live: LiveServer) -> None:
    prompts = [prompt(0), prompt(1)]
    code, probed = live.admin("/probe", {"prompts": prompts, "max_tokens": 12})
    assert code == 200, probed
    code, plain = live.admin("/probe", {"prompts": prompts, "max_tokens": 12, "speculate": False})
    assert code == 200, plain
    assert plain["output_ids"] == probed["output_ids"]
    assert plain["counters"]["num_steps"] == 0
    code, scored = live.admin("/score", {"prompts": prompts, "outputs": probed["output_ids"]})
    assert code == 200, scored
    for row in range(2):
        assert scored["logprobs"][row] == pytest.approx(probed["logprobs"][row], abs=1e-3)
        assert scored["margins"][row] == pytest.approx([0.0] * len(scored["margins"][row]), abs=1e-6)
        assert set(scored["ranks"][row]) == {1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/probe", {"prompts": []}),
        ("/probe", {"prompts": [[]]}),
        ("/probe", {"prompts": [[10**7]]}),
        ("/probe", {"prompts": [[1] * 4000]}),
        ("/probe", {"prompts": [[1]], "max_tokens": 0}),
        ("/probe", {"prompts": [[1]], "temperature": -1.0}),
        ("/probe", {"prompts": [[1]], "n": 2}),
        ("/score", {"prompts": [[1]], "outputs": []}),
        ("/score", {"prompts": [[1]], "outputs": [[]]}),
        ("/score", {"prompts": [[1]], "outputs": [[-1]]}),
        ("/capture", {"enabled": "yes"}),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(path: str, body: object, live: LiveServer) -> None:
    code, answer = live.admin(path, body)
    assert (code, answer["error"]["class"]) == (422, "InputError"), answer

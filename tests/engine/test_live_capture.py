"""Capture from a real vLLM server: every way a request can go is one record a choice, with the engine's own ids."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from live_site import API_KEY, API_TENANT, LiveServer

from draftloop.pipeline.records import CapturedRequest, Sampling, unpack_floats, unpack_ids
from draftloop.pipeline.vllm_server import MODEL_NAME

pytestmark = pytest.mark.engine
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}


def made_by(live: LiveServer, act: Callable[[], object], count: int = 1) -> list[CapturedRequest]:
    """The records of what `act` asks for, in order of their ids; exactly so many."""
    live.settle()
    known = {record.record_id for record in live.records()}
    act()
    live.settle()
    found = [each for each in live.records(at_least=len(known) + count) if each.record_id not in known]
    assert len(found) == count, found
    return sorted(found, key=lambda record: record.record_id)


def offered(live: LiveServer) -> dict[str, int]:
    counters: dict[str, int] = live.settle()["capture"]["counters"]
    return counters


def assert_steps_add_up(record: CapturedRequest) -> None:
    assert sum(record.accepted) + len(record.accepted) == len(record.output_ids) // 4 - 1


def alike(record: CapturedRequest) -> CapturedRequest:
    """Without what differs between two runs of one request."""
    slices = {key: value for key, value in record.slices.items() if key != "stream"}
    return msgspec.structs.replace(record, record_id="", conversation_id="", time_ms=0, slices=slices)


def streamed(live: LiveServer, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[int]:
    """The token ids of a streamed answer, whole."""
    chunks = list(live.stream(path, {**body, "return_token_ids": True}, headers))
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or []]


def test_a_record_holds_what_the_engine_ran_and_the_user_got(live: LiveServer) -> None:
    answers: list[dict[str, Any]] = []
    headers = live.gateway(conversation="c-1", slices="domain=kitchen")
    (record,) = made_by(
        live, lambda: answers.append(live.complete([1001, 1002, 1003], headers=headers, return_token_ids=True))
    )
    (choice,) = answers[0]["choices"]
    assert unpack_ids(record.prompt_ids) == choice["prompt_token_ids"] == [1001, 1002, 1003]
    assert unpack_ids(record.output_ids) == choice["token_ids"]
    assert record.finish_reason == choice["finish_reason"]
    assert record.record_id.startswith(answers[0]["id"])
    assert (record.conversation_id, record.tenant, record.subject) == ("c-1", "acme", "")
    assert (record.consent.purpose, record.consent.policy_version, record.consent.basis) == (
        "train",
        "test",
        "tenant-policy",
    )
    status = live.status()
    assert (record.target, record.drafter_version) == (status["fingerprint_digest"], status["drafter"]["version"])
    assert record.sampling == Sampling(temperature=0.0, max_tokens=24)
    assert record.slices == {"domain": "kitchen", "route": "completions", "stream": "no"}
    assert record.logprobs is None
    assert_steps_add_up(record)
    assert set(record.drafted) == {4}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_or_not_the_record_is_the_same(live: LiveServer, path: str) -> None:
    question: dict[str, Any] = {"prompt": "Streaming once"}
    if "chat" in path:
        question = {"messages": [{"role": "user", "content": "Streaming once"}]}
    body = {"model": MODEL_NAME, "max_tokens": 40, "temperature": 0.0, **question}
    live.post(path, body, live.gateway())  # from here on its prompt is in the prefix cache
    (plain,) = made_by(live, lambda: live.post(path, body, live.gateway()))
    ids: list[int] = []
    (stream,) = made_by(live, lambda: ids.extend(streamed(live, path, body)))
    assert (plain.slices["stream"], stream.slices["stream"]) == ("no", "yes")
    assert alike(plain) == alike(stream)
    assert unpack_ids(stream.output_ids) == ids
    assert_steps_add_up(stream)


def test_each_choice_is_a_record_of_one_conversation(live: LiveServer) -> None:
    records = made_by(live, lambda: live.complete("three ways", n=3, temperature=0.5, seed=7), count=3)
    ids = [record.record_id for record in records]
    assert ids == [ids[0], f"{ids[0]}-1", f"{ids[0]}-2"]
    assert len({record.conversation_id for record in records}) == 1
    assert [record.sampling.seed for record in records] == [7, 8, 9]
    assert len({record.prompt_ids for record in records}) == 1
    for record in records:
        assert_steps_add_up(record)


def test_each_prompt_of_a_list_is_a_request_of_its_own(live: LiveServer) -> None:
    records = made_by(live, lambda: live.complete(["one", "another one"]), count=2)
    assert len({record.conversation_id for record in records}) == 2


def test_a_stream_cut_by_its_client_is_one_record_marked_aborted(live: LiveServer) -> None:
    body = {"prompt": "A story that nobody hears to its end:", **LONG, "return_token_ids": True}
    whole = streamed(live, "/v1/completions", body)
    heard: list[int] = []

    def leave() -> None:
        stream = live.stream("/v1/completions", body)
        while len(heard) < 10:
            heard.extend(next(stream)["choices"][0]["token_ids"])
        stream.close()  # type: ignore[attr-defined]

    (record,) = made_by(live, leave)
    kept = unpack_ids(record.output_ids)
    assert record.finish_reason == "abort"
    assert heard == kept[: len(heard)] == whole[: len(heard)]
    assert len(heard) <= len(kept) < LONG["max_tokens"]
    assert kept == whole[: len(kept)]


def test_a_client_that_does_not_wait_for_its_whole_answer_leaves_one_record_too(live: LiveServer) -> None:
    def leave() -> None:
        connection = http.client.HTTPConnection(live.url.removeprefix("http://"))
        body = json.dumps({"model": MODEL_NAME, "prompt": "Too slow for me", **LONG})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **live.gateway()})
        time.sleep(0.3)
        connection.close()

    (record,) = made_by(live, leave)
    assert record.finish_reason == "abort"
    assert 0 < len(record.output_ids) // 4 < LONG["max_tokens"]


def test_all_choices_of_a_cut_stream_are_records(live: LiveServer) -> None:
    def leave() -> None:
        body = {"prompt": "Two voices", **LONG, "n": 2, "temperature": 0.5}
        stream = live.stream("/v1/completions", body)
        next(stream)
        stream.close()  # type: ignore[attr-defined]

    records = made_by(live, leave, count=2)
    assert [record.finish_reason for record in records] == ["abort", "abort"]


def test_what_is_past_a_stop_string_is_in_neither_answer_nor_record(live: LiveServer) -> None:
    body = {"prompt": [1010, 1020], "max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    text = live.complete(**{key: value for key, value in body.items() if key != "temperature"})["choices"][0]["text"]
    stop = text[len(text) // 2 :][:6]
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        answers.append(live.complete(**{**body, "stop": [stop], "return_token_ids": True}))

    (record,) = made_by(live, ask)
    (choice,) = answers[0]["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], record.finish_reason) == ("stop", stop, "stop")
    assert unpack_ids(record.output_ids) == choice["token_ids"]
    assert_steps_add_up(record)
    (again,) = made_by(live, lambda: streamed(live, "/v1/completions", body | {"stop": [stop]}))
    assert alike(again) == alike(record)


def test_a_prompt_in_the_cache_and_one_prefilled_in_chunks_are_whole_in_the_record(live: LiveServer) -> None:
    prompt = [1000 + index % 500 for index in range(600)]  # the server prefills 256 tokens at once
    first, second = (made_by(live, lambda: live.complete(prompt))[0] for _ in range(2))
    assert unpack_ids(first.prompt_ids) == prompt
    assert alike(first) == alike(second)
    assert_steps_add_up(second)


def test_log_probabilities_are_those_the_client_asked_for(live: LiveServer) -> None:
    answers: list[dict[str, Any]] = []
    (record,) = made_by(live, lambda: answers.append(live.complete("How sure?", logprobs=2, echo=True)))
    told = answers[0]["choices"][0]["logprobs"]["token_logprobs"]
    assert record.logprobs is not None
    outputs = len(record.output_ids) // 4
    assert unpack_floats(record.logprobs) == pytest.approx(told[-outputs:], abs=1e-4)
    assert len(told) == outputs + len(record.prompt_ids) // 4  # the echoed prompt is no output


def test_a_forced_tool_call_is_a_record_with_altered_logits(live: LiveServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    choice = {"type": "function", "function": {"name": "f"}}
    (free,) = made_by(live, lambda: live.chat("Call it if you like", tools=[tool]))
    (forced,) = made_by(live, lambda: live.chat("Call it", tools=[tool], tool_choice=choice, max_tokens=32))
    assert (free.slices.get("logits"), forced.slices.get("logits")) == (None, "altered")
    for record in (free, forced):
        assert_steps_add_up(record)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
        ("/v1/completions", {"prompt": [1] * 5000}),
        ("/v1/chat/completions", {"messages": "none"}),
        ("/v1/completions", {"prompt": "x", "model": "another"}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_requests_that_never_ran_leave_nothing(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    before = offered(live)
    code, _ = live.post(path, {"model": MODEL_NAME, **body}, live.gateway())
    assert 400 <= code < 500
    assert offered(live) == before


def test_only_the_servers_side_says_whose_a_request_is_and_what_may_be_kept(live: LiveServer) -> None:
    own = {name: value for name, value in live.gateway(consent="train").items() if "secret" not in name}
    asked = {"vllm_xargs": {"tenant": "acme", "consent": "train", "x-draftloop-tenant": "acme"}, "user": "acme"}
    before = offered(live)
    live.complete("mine is yours", headers=own, **asked)
    live.complete("guessed", headers={**own, "x-draftloop-gateway-secret": "guess"})
    live.complete("nobody at all", headers={})
    live.complete("not this one", headers=live.gateway(consent="deny"))
    live.complete("nor this", headers={"authorization": f"Bearer {API_KEY}", "x-draftloop-consent": "deny"})
    after = offered(live)
    moved = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert moved == {"offered": 5, "dropped.policy:no_consent": 2, "dropped.policy:denied": 3}

    (keyed,) = made_by(live, lambda: live.complete("by key", headers={"authorization": f"Bearer {API_KEY}"}))
    (vouched,) = made_by(live, lambda: live.complete("by word", headers=live.gateway("newco", consent="train")))
    assert (keyed.tenant, keyed.consent.basis) == (API_TENANT, "tenant-policy")
    assert (vouched.tenant, vouched.consent.basis) == ("newco", "gateway")


def test_capture_can_be_switched_off_and_on(live: LiveServer) -> None:
    try:
        assert live.admin("/capture", {"enabled": False}) == (200, {"capturing": False})
        before = offered(live)
        live.complete("unseen")
        assert offered(live) == before
    finally:
        assert live.admin("/capture", {"enabled": True}) == (200, {"capturing": True})
    made_by(live, lambda: live.complete("seen"))


def mixed_traffic(live: LiveServer) -> int:
    """Requests of many kinds, eight at a time; the number of choices, none of them cut."""

    def ask(index: int) -> None:
        body = {"prompt": [1000 + index, 1003], "max_tokens": 8 + 5 * index, "temperature": 0.0}
        kind = index % 4
        if kind == 0:
            streamed(live, "/v1/completions", body)
        elif kind == 1:
            live.complete(body["prompt"], max_tokens=body["max_tokens"], ignore_eos=True)
        elif kind == 2:
            live.complete(body["prompt"], max_tokens=60, stop=["a", "e"])
        else:
            message = {"role": "user", "content": f"Number {index}"}
            list(live.stream("/v1/chat/completions", {"messages": [message], "max_tokens": 50}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))
    return 24


def test_the_counters_are_exactly_what_users_got_and_probes_are_not_in_them(live: LiveServer) -> None:
    before = live.settle()["counters"]
    records = made_by(live, lambda: mixed_traffic(live), count=24)
    after = live.settle()["counters"]
    for record in records:
        assert_steps_add_up(record)
    assert after["num_steps"] - before["num_steps"] == sum(len(record.accepted) for record in records)
    emitted = sum(len(record.output_ids) // 4 - 1 for record in records)
    assert after["num_emitted"] - before["num_emitted"] == emitted
    offers = offered(live)["offered"]
    assert live.admin("/probe", {"prompts": [[1001, 1002], "hello"], "max_tokens": 16})[0] == 200
    assert live.admin("/score", {"prompts": [[1001, 1002]], "outputs": [[1003, 1004]]})[0] == 200
    assert live.status()["counters"] == after
    assert offered(live)["offered"] == offers


def test_what_the_plug_in_costs_a_request_is_on_status(live: LiveServer) -> None:
    mixed_traffic(live)
    timing = live.settle()["capture"]["serving_us"]
    assert timing["count"] >= 24
    assert 0 < timing["p50"] <= timing["p99"] <= timing["max"]


def test_metrics_name_the_drafter_and_the_fate_of_what_was_captured(live: LiveServer) -> None:
    made_by(live, lambda: live.complete("one for the metrics"))
    status = live.settle()
    code, text = live.get("/metrics")
    assert code == 200
    found = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in str(text).splitlines()}
    drafter = status["drafter"]
    named = f'draftloop_drafter_version_info{{digest="{drafter["digest"]}",version="{drafter["version"]}"}}'
    counters = status["capture"]["counters"]
    expected = {
        named: 1,
        'draftloop_capture_requests_total{outcome="delivered"}': counters["delivered"],
        "draftloop_capture_queue_bytes": 0,
        "draftloop_restart_needed": 0,
        "draftloop_steps_total": status["counters"]["num_steps"],
        "draftloop_emitted_tokens_total": status["counters"]["num_emitted"],
    }
    assert {name: float(found[name]) for name in expected} == expected


def test_prompts_are_in_the_log_alone_and_secrets_nowhere(live: LiveServer) -> None:
    """A marker in a prompt, a key and the gateway's secret in headers: what was refused included."""
    marker, key = "Zanzibarquark", "sk-fake-5b1c7d"
    headers = live.gateway(subject="subject-of-nobody-9", conversation="c-marker")
    (record,) = made_by(live, lambda: live.complete(f"The word is {marker}", headers=headers))
    live.complete(f"Denied {marker}", headers={"authorization": f"Bearer {key}"})
    live.post("/v1/completions", {"model": MODEL_NAME, "prompt": f"Bad {marker}", "max_tokens": -1}, live.gateway())
    log = live.server.log.read_text(errors="replace")
    shown = log + json.dumps(live.status()) + str(live.get("/metrics")[1])
    for word in (marker, key, headers["x-draftloop-gateway-secret"], live.token, "subject-of-nobody-9"):
        assert word not in shown
    assert record.subject == ""
    stored = b"".join(file.read_bytes() for file in live.database.parent.glob("capture.db*"))
    assert record.prompt_ids in stored
    for word in (key, headers["x-draftloop-gateway-secret"], "subject-of-nobody-9"):
        assert word.encode() not in stored


@contextmanager
def log_hangs(live: LiveServer) -> Iterator[None]:
    """Nobody else can write the capture log meanwhile."""
    connection = sqlite3.connect(live.database, isolation_level=None, timeout=10)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def test_while_the_log_hangs_no_answer_differs_and_everything_arrives_in_the_end(live: LiveServer) -> None:
    prompts = [[1000 + index, 1007] for index in range(12)]

    def answer(prompt: list[int]) -> tuple[list[int], str]:
        choice = live.complete(prompt, return_token_ids=True)["choices"][0]
        return choice["token_ids"], choice["finish_reason"]

    live.settle()
    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(answer, prompts))
        live.settle()
        known = len(live.records())
        with log_hangs(live):
            began = time.monotonic()
            assert list(pool.map(answer, prompts)) == expected
            assert time.monotonic() - began < 20
            counters = live.status()["capture"]["counters"]
            assert counters["in_queue"] >= len(prompts) - 1
    assert len(live.records(at_least=known + len(prompts), timeout_s=60)) == known + len(prompts)


def test_terminated_in_traffic_everything_is_delivered_or_counted(live: LiveServer) -> None:
    """Twenty finished that the log has not, eight running whose clients stay on: SIGTERM loses none of them.

    vLLM itself waits for those clients, so that what is not in the log by then would be lost with a SIGKILL.
    """
    live.settle()
    known = {record.record_id for record in live.records()}
    offers = offered(live)["offered"]
    body = {"prompt": "Going on while it ends", **LONG, "max_tokens": 900}
    streams = []
    try:
        with log_hangs(live):
            for index in range(20):
                live.complete([1100 + index], max_tokens=4, ignore_eos=True)
            streams = [live.stream("/v1/completions", body) for _ in range(8)]
            for stream in streams:
                next(stream)
            os.kill(live.server.pid, signal.SIGTERM)
        found = [record for record in live.records(at_least=len(known) + 28, timeout_s=30)]
        ends = [record.finish_reason for record in found if record.record_id not in known]
        assert sorted(ends) == ["abort"] * 8 + ["length"] * 20
    finally:
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        live.server.stop()
        log = live.server.log.read_text(errors="replace")
        live.server.start()
    line = next(line for line in reversed(log.splitlines()) if "capture ended" in line)
    counters = json.loads(line.partition("capture ended: ")[2].replace("'", '"'))
    assert counters["offered"] - offers == 28
    assert counters["offered"] == counters["delivered"] + sum(
        count for name, count in counters.items() if name.startswith("dropped.")
    )

"""The completions client: ids in and out, streams cut or refused are errors, load runs until it is told to end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("torch")

from draftloop.pipeline.completions import Completions, streaming
from draftloop.pipeline.errors import EngineError, EngineUnreachableError
from draftloop.pipeline.records import Sampling
from draftloop.serving_hooks.embedded.types import Request

STEPS = {"per_step_accepted": [1, 0], "per_step_drafted": [4, 4]}


class Twin(BaseHTTPRequestHandler):
    """Answers a prompt p of n tokens with p+1, p+2, ... two ids a piece; prompt 500 is refused, 13 cut."""

    seen: list[dict[str, Any]]
    hung_up: threading.Event

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append({**body, "tenant": self.headers.get("x-tenant")})
        first = body["prompt"][0]
        if first == 500:
            self.send_error(503, "no")
            return
        ids = [first + 1 + index for index in range(body["max_tokens"])]
        self.send_response(200)
        self.end_headers()
        if not body["stream"]:
            choice = {"token_ids": ids, "finish_reason": "length"}
            self.wfile.write(json.dumps({"choices": [choice], "metrics": {"speculative_decoding": STEPS}}).encode())
            return
        pieces = [ids[start : start + 2] for start in range(0, len(ids), 2)]
        try:
            for number, piece in enumerate(pieces):
                last = number == len(pieces) - 1
                if first == 13 and last:
                    return
                self._send({"choices": [{"token_ids": piece, "finish_reason": "length" if last else None}]})
                time.sleep(0.01)
            self._send({"choices": []})  # usage comes without a choice
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.hung_up.set()

    def _send(self, piece: object) -> None:
        self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def twin() -> Iterator[type[Twin]]:
    kind = type("OwnTwin", (Twin,), {"seen": [], "hung_up": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kind.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield kind
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(twin: Any) -> Iterator[Completions]:
    made = Completions(twin.url, "m", streams=4, headers_of=lambda request: {"x-tenant": request.tenant})
    yield made
    made.close()


def asked(first: int, max_tokens: int = 6) -> Request:
    return Request(f"r{first}", (first,), Sampling(max_tokens=max_tokens), tenant="acme")


def test_streamed_and_whole_answers_hold_the_same_ids(client: Completions, twin: Any) -> None:
    answers = client.run([asked(number) for number in (20, 30, 40, 50)])
    assert [answer.output_ids for answer in answers] == [tuple(range(n + 1, n + 7)) for n in (20, 30, 40, 50)]
    assert [len(answer.arrivals) for answer in answers] == [4, 0, 4, 0]
    assert sorted(body["stream"] for body in twin.seen) == [False, False, True, True]
    assert {body["tenant"] for body in twin.seen} == {"acme"}
    assert (answers[1].accepted, answers[1].drafted) == ((1, 0), (4, 4))
    assert all(0.005 < gap < 1 for gap in answers[0].gaps[:2])


def test_a_cut_stream_and_a_refused_request_are_errors(client: Completions) -> None:
    with pytest.raises(EngineError, match="r13 was cut after 4 tokens"):
        client.ask(asked(13), stream=True)
    with pytest.raises(EngineError, match="answered 503"):
        client.ask(asked(500), stream=False)


def test_nobody_at_the_address_is_named(twin: Any) -> None:
    lonely = Completions("http://127.0.0.1:9", "m", streams=1)
    with pytest.raises(EngineUnreachableError, match=r"127\.0\.0\.1:9/v1/completions: ConnectionRefusedError"):
        lonely.ask(asked(1), stream=False)
    lonely.close()


def test_hanging_up_ends_the_stream_with_what_has_come(client: Completions, twin: Any) -> None:
    answer = client.ask(asked(20, max_tokens=400), stream=True, hang_up_after=1)
    assert (answer.output_ids, answer.finish_reason) == ((21, 22), None)
    assert twin.hung_up.wait(5)


def test_load_runs_for_the_length_of_the_block_and_every_request_to_its_end(client: Completions) -> None:
    with streaming(client, [asked(20), asked(30)], streams=3) as seen:
        time.sleep(0.3)
    assert seen.failures == []
    assert len(seen.answers) > 6
    names = [answer.request_id for answer in seen.answers]
    assert len(set(names)) == len(names)
    assert {answer.output_ids for answer in seen.answers} == {tuple(range(21, 27)), tuple(range(31, 37))}


def test_failures_under_load_are_kept_beside_the_answers(client: Completions) -> None:
    with streaming(client, [asked(20), asked(13)], streams=2) as seen:
        time.sleep(0.5)
    assert seen.failures
    assert {str(failure) for failure in seen.failures} != set()
    assert {answer.request_id.partition("#")[0] for answer in seen.answers} == {"r20"}

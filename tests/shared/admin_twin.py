"""The admin route's contract over HTTP on a fake engine: what the plug-in serves, without a vLLM behind it."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from draftloop.pipeline import artifact, errors
from draftloop.pipeline.errors import AdminDeniedError, DraftloopError, InputError, SwapBusyError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.rollout.engine_client import FakeEngine

PREFIX = "/draftloop/v1"
_CODES: dict[str, int] = {
    "AdminDeniedError": 401,
    "SwapBusyError": 409,
    "SwapFailedError": 500,
    "ReplicaLostError": 503,
    "EngineUnsupportedError": 503,
}


@dataclass
class AdminTwin:
    """What the route answers. A test sets what should go wrong; every fault happens once."""

    engine: FakeEngine
    token: str = "secret"
    staging: Path | None = None  # <agent>/drafters: digests are compared with what lies there
    url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    fault: str | None = None  # "drop": not done, not answered; "lose": done, not answered; or an error's class name
    swap_fault: str | None = None  # unanswered until `finish`: "begin": under way meanwhile; "queue": not even begun
    pending: dict[str, Any] | None = None  # the swap that `finish` carries out
    swapping: bool = False
    digest: str | None = None
    trouble: dict[str, str] | None = None
    fingerprint: Fingerprint | None = None

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((path, body))
        if path == f"{PREFIX}/status":
            return self._status()
        if path == "/tokenize":
            return {"tokens": [len(word) for word in body["prompt"].split()], "count": 1}
        if path == f"{PREFIX}/swap":
            return self._swap(body)
        if path == f"{PREFIX}/probe":
            asked = {name: body[name] for name in ("max_tokens", "temperature", "seed", "speculate")}
            return msgspec.to_builtins(self.engine.generate(body["prompts"], **asked))  # type: ignore[attr-defined]
        if path == f"{PREFIX}/score":
            return msgspec.to_builtins(self.engine.score(body["prompts"], body["outputs"]))  # type: ignore[attr-defined]
        raise FileNotFoundError(path)

    def _status(self) -> dict[str, Any]:
        engine, counters = self.engine, self.engine.counters()
        target = self.fingerprint or engine.target
        return {
            "engine": "vllm",
            "release": "0.32.0+cpu",
            "supported": True,
            "trouble": self.trouble,
            "boot_id": engine.boot_id,
            "fingerprint": None if self.trouble else target.to_dict(),
            "fingerprint_digest": None if self.trouble else target.digest,
            "drafter": {
                "version": engine.version,
                "digest": self.digest,
                "tensors": engine.digest_of.get(engine.version),
                "since_ms": 1,
            },
            "swapping": self.swapping,
            "restart_needed": engine.restart_needed,
            "counters": msgspec.to_builtins(counters),
            "swaps": {},
            "capture": {"capturing": False, "counters": None, "last_error": None, "serving_us": {}},
        }

    def leave(self, body: dict[str, Any], *, begun: bool) -> None:
        """Take a swap without answering, and keep it."""
        self.requests.append((f"{PREFIX}/swap", body))
        self.pending, self.swapping = body, begun

    def finish(self) -> None:
        """Carry out the swap whose caller was lost."""
        assert self.pending is not None
        body, self.pending, self.swapping = self.pending, None, False
        self._swap(body)

    def _swap(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.swapping:
            raise SwapBusyError("another swap is under way")
        if self.staging is not None:
            found = self.staging / body["version"] / artifact.MARKER
            if not found.is_file() or found.read_text() != body["digest"]:
                raise errors.CheckpointError(f"version {body['version']} is not what was asked for")
        swapped = self.engine.swap(None if self.staging is None else self.staging / body["version"], body["version"])
        self.digest = body["digest"]
        return {
            "version": body["version"],
            "digest": body["digest"],
            "tensors": swapped.tensors,
            "pause_ms": swapped.pause_ms,
            "swap_ms": swapped.pause_ms + 5,
        }


@contextmanager
def serving(twin: AdminTwin) -> Iterator[AdminTwin]:
    """The twin on a free port of this machine; `url` is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._reply(json.loads(raw or b"{}"))

        def _reply(self, body: dict[str, Any]) -> None:
            fault, answered = None, True
            if self.command == "POST":
                fault, twin.fault = twin.fault, None
            try:
                if fault == "drop":
                    self.close_connection = True
                    return
                if self.path == f"{PREFIX}/swap" and twin.swap_fault is not None:
                    kept, twin.swap_fault = twin.swap_fault, None
                    twin.leave(body, begun=kept == "begin")
                    self.close_connection = True
                    return
                if self.path.startswith(PREFIX) and not hmac.compare_digest(
                    self.headers.get("Authorization", ""), f"Bearer {twin.token}"
                ):
                    raise AdminDeniedError("the admin token is missing or wrong")
                if fault not in (None, "lose"):
                    raise getattr(errors, fault)(f"told to answer {fault}", mend="mend it")
                status, value = 200, twin.answer(self.path, body)
                answered = fault != "lose"
            except FileNotFoundError:
                status, value = 404, {"detail": "Not Found"}
            except DraftloopError as error:
                name = type(error).__name__
                status = _CODES.get(name, 422)
                value = {"error": {"class": name, "message": error.message, "mend": error.mend}}
            except (KeyError, TypeError, AttributeError) as error:
                status, value = 422, {"error": {"class": InputError.__name__, "message": repr(error), "mend": None}}
            if not answered:
                self.close_connection = True
                return
            raw = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    twin.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield twin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""Requests of a running server over OpenAI's completions API, token by token: ids in, ids out, with their times."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from draftloop.pipeline.errors import EngineError, EngineUnreachableError
from draftloop.serving_hooks.embedded.types import Request

PATH = "/v1/completions"


@dataclass(frozen=True)
class Answer:
    """What a client saw of one request. Times are of time.perf_counter."""

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str | None  # None: hung up before the end
    started: float
    ended: float
    arrivals: tuple[float, ...] = ()  # of each streamed piece
    accepted: tuple[int, ...] = ()  # per step, as the engine tells it: what lies past the end counts too
    drafted: tuple[int, ...] = ()

    @property
    def gaps(self) -> list[float]:
        """Seconds between two streamed pieces."""
        return [late - early for early, late in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass
class _Seen:
    """An answer in the making."""

    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    arrivals: list[float] = field(default_factory=list)
    steps: dict[str, Any] = field(default_factory=dict)

    def take(self, choice: Mapping[str, Any]) -> None:
        self.output_ids += choice.get("token_ids") or []
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


class Completions:
    """Thread-safe client of one server; at most `streams` requests at once."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        streams: int,
        headers_of: Callable[[Request], Mapping[str, str]] = lambda request: {},
        timeout_s: float = 300.0,
    ) -> None:
        """headers_of: what a gateway would send along with a request."""
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port)
        self._url, self._model, self._headers_of, self._timeout_s = url, model, headers_of, timeout_s
        self._pool = ThreadPoolExecutor(max_workers=streams, thread_name_prefix="stream")

    def close(self) -> None:
        """Wait for what was submitted."""
        self._pool.shutdown()

    def submit(self, request: Request, *, stream: bool, extra: Mapping[str, Any] | None = None) -> Future[Answer]:
        """Queue a request. The future raises EngineUnreachableError, EngineError (another answer than 200, or cut)."""
        return self._pool.submit(self.ask, request, stream=stream, extra=extra)

    def run(
        self,
        requests: Sequence[Request],
        *,
        stream: Callable[[int], bool] = lambda index: index % 2 == 0,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Requests to their end, in order. stream: by index; by default every second one, so that both are used."""
        futures = [self.submit(request, stream=stream(index)) for index, request in enumerate(requests)]
        answers = []
        for future in futures:
            answers.append(future.result())
            if on_done is not None:
                on_done(len(answers))
        return answers

    def ask(
        self,
        request: Request,
        *,
        stream: bool,
        extra: Mapping[str, Any] | None = None,
        hang_up_after: int | None = None,
    ) -> Answer:
        """One request in this thread. hang_up_after: close the connection after so many streamed pieces."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "seed": sampling.seed,
            "stream": stream,
            "return_token_ids": True,
            **(extra or {}),
        }
        seen, started = _Seen(), time.perf_counter()
        for piece in self._pieces(body, self._headers_of(request)):
            seen.arrivals.append(time.perf_counter())
            seen.steps = (piece.get("metrics") or {}).get("speculative_decoding") or seen.steps
            for choice in piece.get("choices") or []:
                seen.take(choice)
            if hang_up_after is not None and len(seen.arrivals) >= hang_up_after:
                break
        if seen.finish_reason is None and hang_up_after is None:
            raise EngineError(f"request {request.request_id} was cut after {len(seen.output_ids)} tokens")
        return Answer(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            output_ids=tuple(seen.output_ids),
            finish_reason=seen.finish_reason,
            started=started,
            ended=time.perf_counter(),
            arrivals=tuple(seen.arrivals) if stream else (),
            accepted=tuple(seen.steps.get("per_step_accepted") or ()),
            drafted=tuple(seen.steps.get("per_step_drafted") or ()),
        )

    def _pieces(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            sent = msgspec.json.encode(body)
            connection.request("POST", PATH, sent, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            if answer.status != 200:
                told = answer.read(2000).decode(errors="replace")
                raise EngineError(f"{self._url}{PATH} answered {answer.status}: {told}")
            if not body["stream"]:
                yield msgspec.json.decode(answer.read(), type=dict[str, Any])
                return
            for line in answer:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    yield msgspec.json.decode(data, type=dict[str, Any])
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise EngineUnreachableError(
                f"{self._url}{PATH}: {type(error).__name__}: {error}", mend="see the server's log"
            ) from error
        finally:
            connection.close()


@dataclass
class Streamed:
    """What came of `streaming`, once it has ended."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[EngineError] = field(default_factory=list)


@contextmanager
def streaming(completions: Completions, requests: Sequence[Request], *, streams: int) -> Iterator[Streamed]:
    """Keep `streams` streamed requests running for the length of the block, the same ones again and again.

    What is yielded is filled when the block has ended and all of them have. An answer's id is REQUEST#NUMBER.
    """
    ended, taken, seen = threading.Event(), itertools.count(), Streamed()

    def work() -> None:
        while not ended.is_set():
            number = next(taken)
            request = requests[number % len(requests)]
            try:
                named = replace(request, request_id=f"{request.request_id}#{number}")
                seen.answers.append(completions.ask(named, stream=True))
            except EngineError as error:
                seen.failures.append(error)
                ended.wait(0.2)  # a server that refuses is not asked as fast as it can

    with ThreadPoolExecutor(max_workers=streams, thread_name_prefix="load") as pool:
        workers = [pool.submit(work) for _ in range(streams)]
        try:
            yield seen
        finally:
            ended.set()
        for worker in workers:
            worker.result()

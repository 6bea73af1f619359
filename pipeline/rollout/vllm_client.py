"""The rollout's view of one vLLM replica: the admin route of our plug-in over HTTP, and vLLM's own tokenizer route."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import (
    AdminDeniedError,
    CheckpointError,
    ConfigError,
    DraftloopError,
    EngineError,
    EngineUnreachableError,
    EngineUnsupportedError,
    FingerprintMismatchError,
    InputError,
    ReplicaLostError,
    SwapBusyError,
    SwapFailedError,
    SwapRefusedError,
)
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.records import Condition, ProbeResult, SpecCounters, Swapped
from draftloop.pipeline.rollout.engine_client import Generated, Scores

PREFIX = "/draftloop/v1"
_LONGEST_ANSWER = 64 * 2**20  # bytes
_POLL_S = 0.2

_CLASSES: dict[str, type[DraftloopError]] = {
    each.__name__: each
    for each in (
        AdminDeniedError,
        CheckpointError,
        ConfigError,
        EngineError,
        EngineUnsupportedError,
        FingerprintMismatchError,
        InputError,
        ReplicaLostError,
        SwapBusyError,
        SwapFailedError,
        SwapRefusedError,
    )
}
_BY_STATUS: dict[int, type[DraftloopError]] = {
    401: AdminDeniedError,
    403: AdminDeniedError,
    409: SwapBusyError,
    422: SwapRefusedError,
    500: EngineError,
}

T = TypeVar("T")


class _Drafter(msgspec.Struct):
    version: str | None = None
    digest: str | None = None
    tensors: str | None = None


class _Trouble(msgspec.Struct):
    message: str = ""
    mend: str | None = None


class _Status(msgspec.Struct):
    boot_id: str
    drafter: _Drafter
    counters: SpecCounters
    swapping: bool = False
    restart_needed: str | None = None
    fingerprint: dict[str, Any] | None = None
    trouble: _Trouble | None = None
    supported: bool = True
    release: str = "unknown"


class _SwapDone(msgspec.Struct):
    tensors: str
    pause_ms: float


class _Probed(msgspec.Struct):
    output_ids: tuple[tuple[int, ...], ...]
    margins: tuple[tuple[float, ...], ...]
    counters: SpecCounters


class _Lost(Exception):  # noqa: N818  no error of ours: nothing is known yet
    """The request was sent and no answer came."""


class VllmClient:
    """`EngineClient` and `ProbingEngine` over HTTP. No connection outlives a call: a restarted engine is no event."""

    def __init__(
        self,
        url: str,
        token_file: Path,
        *,
        timeout_s: float = 30.0,
        swap_timeout_s: float = 900.0,
        probe_timeout_s: float = 600.0,
    ) -> None:
        """url: http://host:port of the server. token_file is read anew for each call. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.username:
            raise ConfigError(f"engine address {url!r}", mend="write http://127.0.0.1:8000, without a path or a login")
        self._url = f"{parts.scheme}://{parts.netloc}"
        self._tls, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._token_file = token_file
        self._timeout_s, self._swap_timeout_s, self._probe_timeout_s = timeout_s, swap_timeout_s, probe_timeout_s

    def fingerprint(self) -> Fingerprint:
        """Raises EngineUnsupportedError where the plug-in is not set up, or in trouble."""
        status = self._status()
        self._require_set_up(status)
        try:
            return Fingerprint.from_dict(status.fingerprint)
        except msgspec.ValidationError as error:
            raise EngineUnsupportedError(
                f"the engine at {self._url} names its target in another form: {error}",
                mend="the same draftloop on both sides",
            ) from error

    def _require_set_up(self, status: _Status) -> None:
        if status.trouble is not None or status.fingerprint is None:
            why, mend = (status.trouble.message, status.trouble.mend) if status.trouble else ("no fingerprint", None)
            raise EngineUnsupportedError(f"the engine at {self._url} cannot be swapped: {why}", mend=mend)

    def drafter_version(self) -> str | None:
        return self.condition().version

    def counters(self) -> SpecCounters:
        return self._status().counters

    def condition(self) -> Condition:
        """Waits for a swap under way to end, and for an engine that has just started to know its drafter.

        Raises SwapBusyError, EngineUnsupportedError where that does not come to pass.
        """
        start = time.monotonic()
        while (status := self._idle(start)).drafter.version is None and status.restart_needed is None:
            self._require_set_up(status)
            if time.monotonic() - start > self._timeout_s:
                raise EngineUnsupportedError(
                    f"the engine at {self._url} does not know its drafter", mend="look at its log, and ask again"
                )
            time.sleep(_POLL_S)
        drafter = status.drafter
        return Condition(
            status.boot_id, drafter.version, drafter.digest or "", drafter.tensors or "", status.restart_needed
        )

    def status(self) -> dict[str, Any]:
        """The whole status object, as the engine tells it. Raises EngineUnreachableError, AdminDeniedError."""
        return self._decoded(self._get_status(), dict[str, Any])

    def swap(self, folder: Path | None, version: str | None) -> Swapped:
        """Ask for a version by name and digest; the engine reads it from its own staging folder.

        Where the answer is lost, status tells how it went. `pause_ms` is then the time waited. Raises as EngineClient,
        and EngineUnreachableError where the request was sent and nothing tells what became of it.
        """
        if folder is None or version is None:
            raise SwapRefusedError(
                "vLLM cannot serve without the drafter it was started with",
                mend="restart it without --speculative-config",
            )
        if not artifact.is_complete(folder):
            raise CheckpointError(f"no complete drafter at {folder}", mend="stage it again")
        digest = (folder / artifact.MARKER).read_text().strip()
        start = time.monotonic()
        boot_id = self._idle(start).boot_id
        try:
            return self._ask_for(version, digest)
        except _Lost as lost:
            first = lost
        try:
            done = self._outcome(version, digest, boot_id, start, first)
            # None: it never arrived, or it failed and the reason was lost: asking again does it or tells
            return done or self._ask_for(version, digest)
        except _Lost as lost:
            raise SwapFailedError(f"the engine's answers to a swap to version {version} are lost: {lost}") from lost
        except (SwapBusyError, AdminDeniedError, EngineUnsupportedError, ConfigError) as error:
            raise EngineUnreachableError(  # the first request may still be carried out
                f"nobody knows how the swap to version {version} went ({first}): {error.message}",
                mend=error.mend or "see the engine's log; the agent goes on when it answers again",
            ) from error

    def probe(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> ProbeResult:
        found = self.generate(prompts, max_tokens=max_tokens)
        return ProbeResult(found.output_ids, found.margins, found.counters)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        speculate: bool = True,
    ) -> Generated:
        """Outputs of internal requests: never captured, in no counter. Raises EngineUnreachableError and as told.

        A seed at a temperature is for engines known to bear it: vLLM 0.32 on a CPU may die of it.
        """
        asked = {
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "speculate": speculate,
        }
        found = self._asked("/probe", asked, _Probed)
        if len(found.output_ids) != len(prompts):
            raise EngineError(f"the engine answered {len(found.output_ids)} of {len(prompts)} probes")
        return Generated(found.output_ids, found.margins, found.counters)

    def score(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Scores:
        """How likely the target by itself finds the outputs, token by token."""
        asked = {"prompts": [list(each) for each in prompts], "outputs": [list(each) for each in outputs]}
        return self._asked("/score", asked, Scores)

    def tokenize(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of plain texts, by vLLM's own tokenizer."""
        found = []
        for text in texts:
            try:
                raw = self._call("POST", "/tokenize", {"prompt": text}, self._timeout_s, prefix="")
            except _Lost as error:
                raise self._unreachable(error) from error
            found.append(tuple(self._decoded(raw, _Tokens).tokens))
        return found

    # How a swap went whose answer nobody got.

    def _idle(self, start: float) -> _Status:
        """Status without a swap under way: until it ends, nothing says which drafter stays. Raises SwapBusyError."""
        while (status := self._status()).swapping:
            if time.monotonic() - start > self._swap_timeout_s:
                raise SwapBusyError("another swap has been under way all the time", mend="look at the engine's log")
            time.sleep(_POLL_S)
        return status

    def _ask_for(self, version: str, digest: str) -> Swapped:
        raw = self._call("POST", "/swap", {"version": version, "digest": digest}, self._swap_timeout_s)
        done = self._decoded(raw, _SwapDone)
        return Swapped(done.tensors, done.pause_ms)

    def _outcome(self, version: str, digest: str, boot_id: str, start: float, lost: _Lost) -> Swapped | None:
        """What status says of a swap whose answer was lost; None: the engine drafts with something else."""
        try:
            status = self._idle(start)
        except EngineUnreachableError as error:
            raise self._died(version, lost) from error
        if status.restart_needed:
            raise ReplicaLostError(status.restart_needed, mend="restart this replica")
        if (status.drafter.version, status.drafter.digest) == (version, digest):
            return Swapped(status.drafter.tensors or "", (time.monotonic() - start) * 1000)
        if status.boot_id != boot_id:
            raise self._died(version, lost)
        return None

    def _died(self, version: str, lost: _Lost) -> EngineUnreachableError:
        return EngineUnreachableError(
            f"the engine at {self._url} went away during the swap to version {version} ({lost})",
            mend="see its log; the agent goes on when it answers again",
        )

    # HTTP.

    def _get_status(self) -> bytes:
        try:
            return self._call("GET", "/status", None, self._timeout_s)
        except _Lost as error:
            raise self._unreachable(error) from error

    def _status(self) -> _Status:
        return self._decoded(self._get_status(), _Status)

    def _asked(self, path: str, asked: Mapping[str, Any], kind: type[T]) -> T:
        try:
            return self._decoded(self._call("POST", path, asked, self._probe_timeout_s), kind)
        except _Lost as error:
            raise self._unreachable(error) from error

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, *, prefix: str = PREFIX
    ) -> bytes:
        """One request. Raises EngineUnreachableError where it was not sent, _Lost where no whole answer came."""
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(timeout_s, self._timeout_s))
        headers = {"Authorization": f"Bearer {self._token()}"} if prefix else {}
        sent = None if body is None else msgspec.json.encode(body)
        try:
            try:
                connection.connect()
                assert connection.sock is not None
                connection.sock.settimeout(timeout_s)
            except OSError as error:
                raise self._unreachable(error) from error
            try:
                connection.request(method, prefix + path, sent, {**headers, "Content-Type": "application/json"})
                response = connection.getresponse()
                raw = response.read(_LONGEST_ANSWER)
            except (OSError, http.client.HTTPException) as error:
                raise _Lost(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise self._error(response.status, raw, path)
        return raw

    def _token(self) -> str:
        try:
            token = self._token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"no admin token in {self._token_file}: {error}", mend="copy the file that swap.token_file names"
            ) from None
        if not token.isascii() or not token.isprintable() or not token or " " in token:
            raise ConfigError(f"{self._token_file} holds no token", mend="one line of letters and digits")
        return token

    def _error(self, status: int, raw: bytes, path: str) -> DraftloopError:
        told: dict[str, Any] = {}
        try:
            answer = msgspec.json.decode(raw)
            found = answer.get("error") if isinstance(answer, dict) else None
            told = found if isinstance(found, dict) else {}
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass  # a proxy's page, or a server of another kind
        name, mend = told.get("class"), told.get("mend")
        message = told.get("message") if isinstance(told.get("message"), str) else None
        if status == 404 and not told:
            return EngineUnsupportedError(
                f"{self._url} has no route {path}",
                mend="start it with VLLM_PLUGINS=draftloop, DRAFTLOOP_SERVING and swap.token_file: docs/vllm.md",
            )
        known = _CLASSES.get(name) if isinstance(name, str) else None
        kind = known or _BY_STATUS.get(status, EngineUnsupportedError if status == 503 else EngineError)
        return kind(message or f"{self._url}{path} answered {status}", mend=mend if isinstance(mend, str) else None)

    def _decoded(self, raw: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineUnsupportedError(
                f"the engine at {self._url} answers in another form: {error}", mend="the same draftloop on both sides"
            ) from error

    def _unreachable(self, error: BaseException) -> EngineUnreachableError:
        return EngineUnreachableError(
            f"nothing answers at {self._url}: {error}", mend="start the engine, or correct replica.url"
        )


class _Tokens(msgspec.Struct):
    tokens: list[int]

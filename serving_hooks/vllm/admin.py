"""The admin routes under /draftloop/v1, put beside vLLM's own by its endpoint plug-in contract.

Bodies and answers are JSON; whatever is refused is answered as {"error": {"class", "message", "mend"}}.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from draftloop.pipeline.errors import (
    AdminDeniedError,
    DraftloopError,
    EngineUnsupportedError,
    InputError,
    ReplicaLostError,
    StorageError,
    SwapBusyError,
    SwapFailedError,
)
from draftloop.serving_hooks.vllm import identity, probe, versions, wake
from draftloop.serving_hooks.vllm.admin_auth import NoTokenError, require_admin
from draftloop.serving_hooks.vllm.audit import Audit, Denials
from draftloop.serving_hooks.vllm.runtime import Runtime, current
from draftloop.serving_hooks.vllm.status import status
from draftloop.serving_hooks.vllm.swap import Swapper

PREFIX = "/draftloop/v1"
SWAP = "drafter.swap"
_SMALL, _LARGE = 4096, 4 * 2**20  # bytes of a body
_log = logging.getLogger("vllm.draftloop")  # only what is below its name does vLLM show
_T = TypeVar("_T")


class SwapRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /swap."""

    version: str
    digest: str


class CaptureRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /capture."""

    enabled: bool


class AdminPlugin:
    """What vLLM builds in the API server process when VLLM_PLUGINS names us."""

    name = "draftloop"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._runtime = current()
        self._engine: Any = None
        self._swapper: Swapper | None = None
        self._audit = _audit(self._runtime)
        self._denials = Denials(lambda reason: self._write_now("denied", SwapRequest("", ""), reason))
        self._weights: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._swaps: set[asyncio.Task[dict[str, Any]]] = set()

    def attach_router(self, app: Any) -> None:
        """Add our routes, and the middleware that knows whose request it is."""
        from draftloop.serving_hooks.vllm.middleware import Identify

        routes: dict[str, tuple[str, Callable[[Any], Awaitable[Any]]]] = {
            "/status": ("GET", self._status),
            "/swap": ("POST", self._swap),
            "/probe": ("POST", self._probe),
            "/score": ("POST", self._score),
            "/capture": ("POST", self._capture),
            "/inspect": ("POST", self._inspect),
        }
        for path, (method, handler) in routes.items():
            app.router.add_route(f"{PREFIX}{path}", self._guarded(handler, path), methods=[method])
        app.router.add_route(f"{PREFIX}/health", self._health, methods=["GET"])
        app.add_middleware(Identify)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Meet the engine: is it the target of the fingerprint file, and what does it draft with?"""
        self._engine = engine_client
        if engine_client is None:
            return
        self._compare(getattr(args, "chat_template", None))
        self._swapper = Swapper(engine_client, self._runtime)
        setattr(engine_client, wake.SWAPPER, self._swapper)
        self._swapper.start(self._runtime.trouble or _unsupported(engine_client, args))
        settings = self._runtime.settings
        if self._runtime.trouble is None and settings is not None and settings.swap.token_file is not None:
            self._warming = asyncio.create_task(self._warm_up())

    def _compare(self, chat_template: str | None) -> None:
        expected = self._runtime.fingerprint
        if expected is None or self._runtime.trouble is not None:
            return
        try:
            identity.require_target(expected, self._engine.vllm_config, self._engine.get_tokenizer(), chat_template)
        except DraftloopError as error:
            self._trouble(error)
        except Exception as error:  # noqa: BLE001  outermost guard: a name of vLLM's is gone, serving goes on
            self._trouble(versions.missing(error))
        else:
            self._weights = asyncio.create_task(self._compare_weights())

    async def _compare_weights(self) -> None:
        assert self._runtime.fingerprint is not None
        folder = Path(self._engine.vllm_config.model_config.model)
        try:
            await asyncio.to_thread(identity.require_weights, self._runtime.fingerprint, folder)
        except DraftloopError as error:
            self._trouble(error)

    async def _warm_up(self) -> None:
        try:
            await probe.warm_up(self._engine)
        except Exception as error:  # noqa: BLE001  outermost guard of a background task: the first probe says it again
            _log.warning("draftloop: the first probe failed: %s", error)

    def _trouble(self, error: DraftloopError) -> None:
        self._runtime.trouble = error
        self._runtime.capturing = False
        _log.error("draftloop neither captures nor swaps in this server: %s", error)

    # Routes.

    async def _health(self, request: Any) -> Any:
        reason = self._runtime.restart_needed
        if reason is None:
            return _answer({"ok": True}, 200)
        return _answer({"ok": False, "reason": reason}, 503)

    async def _status(self, request: Any) -> dict[str, Any]:
        return status(self._runtime, self._swapper)

    async def _swap(self, request: Any) -> dict[str, Any]:
        try:
            asked = await _body(request, SwapRequest, _SMALL)
        except InputError as error:
            await self._write("refused", SwapRequest("", ""), f"{type(error).__name__}: {error.message}")
            raise
        except Exception as error:  # outermost guard: a caller that hangs up in the middle of its body is one
            raise await self._unforeseen(SwapRequest("", ""), error) from error
        running = asyncio.create_task(self._swap_written_down(asked))
        self._swaps.add(running)  # asyncio itself holds tasks weakly
        running.add_done_callback(self._swaps.discard)
        return await asyncio.shield(running)  # a caller that goes away stops nothing

    async def _swap_written_down(self, asked: SwapRequest) -> dict[str, Any]:
        if self._audit is not None:
            await asyncio.to_thread(self._audit.require)
        try:
            done = await self._met().swap(asked.version, asked.digest)
        except DraftloopError as error:
            outcome = "failed" if isinstance(error, SwapFailedError) else "refused"
            await self._write(outcome, asked, f"{type(error).__name__}: {error.message}")
            raise
        except Exception as error:  # outermost guard of the route
            raise await self._unforeseen(asked, error) from error
        await self._write("done", asked, None)
        return asdict(done)

    async def _unforeseen(self, asked: SwapRequest, error: Exception) -> SwapFailedError:
        reason = f"{type(error).__name__}: {error}"
        _log.error("draftloop: a swap failed in a way nobody foresaw", exc_info=error)
        await self._write("failed", asked, reason)
        return SwapFailedError(f"the swap failed: {reason}", mend="see the engine's log")

    async def _probe(self, request: Any) -> dict[str, Any]:
        return await probe.probe(self._engine, await _body(request, probe.ProbeRequest, _LARGE))

    async def _score(self, request: Any) -> dict[str, Any]:
        return await probe.score(self._engine, await _body(request, probe.ScoreRequest, _LARGE))

    async def _capture(self, request: Any) -> dict[str, Any]:
        asked = await _body(request, CaptureRequest, _SMALL)
        if asked.enabled and self._runtime.trouble is not None:
            raise self._runtime.trouble
        self._runtime.capturing = asked.enabled
        return {"capturing": self._runtime.capturing}

    async def _inspect(self, request: Any) -> dict[str, Any]:
        """Read out of the workers what they compute with; requests wait meanwhile."""
        return {"workers": await self._met().inspect()}

    # Around them.

    def _met(self) -> Swapper:
        if self._swapper is None:
            raise self._runtime.trouble or EngineUnsupportedError("there is no engine", mend="ask the API server")
        return self._swapper

    def _guarded(self, handler: Callable[[Any], Awaitable[Any]], path: str) -> Callable[[Any], Awaitable[Any]]:
        async def endpoint(request: Any) -> Any:
            try:
                settings = self._runtime.settings
                client = request.client.host if request.client else None
                require_admin(settings.swap if settings else None, request.headers, client)
            except AdminDeniedError as error:
                if path == "/swap":
                    await self._denials.add(error.message)
                return _refused(error, 401 if isinstance(error, NoTokenError) else 403)
            try:
                return _answer(await handler(request), 200)
            except DraftloopError as error:
                return _refused(error, _code(error))

        return endpoint

    async def _write(self, outcome: str, asked: SwapRequest, reason: str | None) -> None:
        await asyncio.to_thread(self._write_now, outcome, asked, reason)

    def _write_now(self, outcome: str, asked: SwapRequest, reason: str | None) -> bool:
        if self._audit is None:
            return True
        line = {"version": asked.version or None, "digest": asked.digest or None, "reason": reason}
        try:
            self._audit.write(SWAP, outcome, serving=self._runtime.served.version, **line)
        except StorageError as error:  # it could be written before: what has happened since is answered all the same
            _log.error("%s; lost: %s %s", error, outcome, line)
            return False
        return True


def _audit(runtime: Runtime) -> Audit | None:
    if runtime.settings is None:
        return None
    swap = runtime.settings.swap
    if swap.audit_file is not None:
        return Audit(swap.audit_file)
    return None if swap.staging is None else Audit(swap.staging.parent / "engine-audit.jsonl")


def _unsupported(engine: Any, args: Any) -> EngineUnsupportedError | None:
    """What this server was started with that keeps drafters from being swapped."""
    config = engine.vllm_config
    transfer = config.weight_transfer_config
    if config.speculative_config is None or config.speculative_config.draft_model_config is None:
        return EngineUnsupportedError("the engine was started without a drafter", mend="add --speculative-config")
    if transfer is None or transfer.backend != "draft_disk":
        return EngineUnsupportedError(
            "the engine was started without a way to take weights",
            mend="""add --weight-transfer-config '{"backend":"draft_disk"}'""",
        )
    if int(getattr(args, "api_server_count", None) or 1) > 1 or config.parallel_config.data_parallel_size > 1:
        return EngineUnsupportedError(
            "the server has several API processes or engines, and a swap reaches one",
            mend="start one server an engine, behind a router, with an agent each",
        )
    return None


async def _body(request: Any, kind: type[_T], limit: int) -> _T:
    """Raises InputError."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise InputError(f"the body has more than {limit} bytes", mend="send less")
    try:
        return msgspec.json.decode(bytes(data), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is one
        raise InputError(f"the body: {error}", mend="send what docs/vllm.md shows") from None


def _code(error: DraftloopError) -> int:
    if isinstance(error, SwapBusyError):
        return 409
    if isinstance(error, ReplicaLostError | EngineUnsupportedError):
        return 503
    return 500 if isinstance(error, SwapFailedError) else 422


def _answer(body: object, code: int) -> Any:
    from starlette.responses import Response

    return Response(msgspec.json.encode(body), code, media_type="application/json")


def _refused(error: DraftloopError, code: int) -> Any:
    said = {"class": type(error).__name__, "message": error.message, "mend": error.mend}
    if isinstance(error, NoTokenError):
        said["class"] = AdminDeniedError.__name__
    return _answer({"error": said}, code)

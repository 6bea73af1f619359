"""The admin routes under /draftloop/v1, put beside vLLM's own by its endpoint plug-in contract."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.runtime import Runtime, current

PREFIX = "/draftloop/v1"


class AdminPlugin:
    """What vLLM builds in the API server process when VLLM_PLUGINS names us."""

    name = "draftloop"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._runtime = current()

    def attach_router(self, app: Any) -> None:
        """Add our routes and the middleware that knows whose request it is."""
        app.add_api_route(f"{PREFIX}/health", self._health, methods=["GET"], include_in_schema=False)
        app.add_api_route(f"{PREFIX}/status", self._status, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Meet the engine."""
        self._engine = engine_client

    async def _health(self) -> Any:
        from starlette.responses import JSONResponse

        reason = self._runtime.restart_needed
        if reason is None:
            return JSONResponse({"ok": True})
        return JSONResponse({"ok": False, "reason": reason}, status_code=503)

    async def _status(self) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse(status(self._runtime))


def status(runtime: Runtime) -> dict[str, Any]:
    """The body of GET /status."""
    trouble = runtime.trouble
    return {
        "engine": "vllm",
        "trouble": None
        if trouble is None
        else {"class": type(trouble).__name__, "message": trouble.message, "mend": trouble.mend},
        "boot_id": runtime.boot_id,
        "drafter": asdict(runtime.served),
        "supported_releases": list(versions.SUPPORTED),
    }

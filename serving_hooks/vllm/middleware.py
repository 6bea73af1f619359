"""Who a request belongs to, decided on the server's side and kept for the length of the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_internal: ContextVar[bool] = ContextVar("draftloop_internal", default=False)


@contextmanager
def internal() -> Iterator[None]:
    """Requests begun in here are the plug-in's own: never captured, not in the counters."""
    token = _internal.set(True)
    try:
        yield
    finally:
        _internal.reset(token)


class Identify:
    """Pure ASGI."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass the request on."""
        await self._app(scope, receive, send)

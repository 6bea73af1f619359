"""Who a request belongs to, decided on the server's side and kept for the length of the request.

A client's own word counts for nothing but one thing: its denial. Our headers end here: the application behind, its logs
and its other middleware see neither the gateway's secret nor whom it speaks for.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from draftloop.pipeline.stream.policy import Assertion
from draftloop.serving_hooks.vllm.runtime import current
from draftloop.serving_hooks.vllm.settings import IdentitySettings

PREFIX = b"x-draftloop-"
ROUTES = {"chat/completions": "chat", "completions": "completions", "responses": "responses", "messages": "messages"}
_MARK = "draftloop.identified"  # in the scope: twice in the stack is once
_LOOK_AGAIN_S = 1.0
_log = logging.getLogger("vllm.draftloop")

Headers = Sequence[tuple[bytes, bytes]]


class Identity(NamedTuple):
    """What the server's side knows of a request. All empty: nobody, who has consented to nothing."""

    tenant: str = ""
    subject: str = ""  # pseudonymous
    conversation: str = ""  # "": the request is its own
    asserted: Assertion | None = None
    route: str = "other"
    slices: tuple[tuple[str, str], ...] = ()  # what the gateway sorts traffic by: domain, language


NOBODY = Identity()
_identity: ContextVar[Identity] = ContextVar("draftloop_identity", default=NOBODY)
_internal: ContextVar[bool] = ContextVar("draftloop_internal", default=False)


def caller() -> Identity:
    """Whose request this context serves."""
    return _identity.get()


def is_internal() -> bool:
    """Whether this context's requests are the plug-in's own."""
    return _internal.get()


@contextmanager
def internal() -> Iterator[None]:
    """Requests begun in here are the plug-in's own: never captured, not in the counters."""
    token = _internal.set(True)
    try:
        yield
    finally:
        _internal.reset(token)


class SecretFile:
    """A secret that may be replaced while the server runs; b"" where there is none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._value = b""
        self._state: tuple[int, int] | None = None
        self._looked = float("-inf")

    def read(self) -> bytes:
        """The file's content without white space around it; looks for a new one once a second at most."""
        now = time.monotonic()
        if self._path is None or now - self._looked < _LOOK_AGAIN_S:
            return self._value
        self._looked = now
        try:
            found = self._path.stat()
            state = found.st_mtime_ns, found.st_ino
            if state != self._state:
                self._value, self._state = self._path.read_bytes().strip(), state
        except OSError as error:
            if self._state is not None or not self._value:
                _log.warning("%s: %s: nobody is trusted by it", self._path, type(error).__name__)
            self._value, self._state = b"", None
        return self._value


class Identities:
    """Reads identities off headers."""

    def __init__(self, settings: IdentitySettings) -> None:
        self._settings = settings
        self._secret = SecretFile(settings.gateway_secret_file)
        self._subject_key = SecretFile(settings.subject_key_file)

    def of(self, path: str, ours: Headers, authorization: bytes) -> Identity:
        """ours: the headers that begin with PREFIX, the prefix cut off."""
        route = _route(path)
        consents = [value.strip().lower() for name, value in ours if name == b"consent"]
        asserted: Assertion | None = "deny" if any(value != b"train" for value in consents) else None
        shown = [value.strip() for name, value in ours if name == b"gateway-secret"]
        if not shown or self._settings.gateway_secret_file is None:
            return Identity(self._tenant_of(authorization), "", "", asserted, route)
        if not self._is_secret(shown):  # whoever it is for, it is not for the tenant that stands for everybody else
            return Identity(asserted="deny", route=route)
        said = {name: {value.strip() for other, value in ours if other == name} for name in _SAID}
        if any(len(values) > 1 for values in said.values()):  # a client's header beside the gateway's: whose is whose?
            return Identity(asserted="deny", route=route)
        tenant, subject, conversation, slices = (_text(said[name]) for name in _SAID)
        if consents and asserted is None:
            asserted = "train"
        return Identity(
            tenant or self._tenant_of(authorization),
            self._pseudonym(subject),
            conversation,
            asserted,
            route,
            _pairs(slices),
        )

    def _is_secret(self, shown: Sequence[bytes]) -> bool:
        secret = self._secret.read()
        return bool(secret) and all([hmac.compare_digest(value, secret) for value in shown])

    def _tenant_of(self, authorization: bytes) -> str:
        keys = self._settings.api_keys
        if keys and authorization[:7].lower() == b"bearer ":
            return keys.get(hashlib.sha256(authorization[7:].strip()).hexdigest(), self._settings.default_tenant)
        return self._settings.default_tenant

    def _pseudonym(self, subject: str) -> str:
        key = self._subject_key.read()
        if not key or not subject:
            return ""
        return hmac.new(key, subject.encode(), hashlib.sha256).hexdigest()


_SAID = (b"tenant", b"subject", b"conversation", b"slices")
_MOST_SLICES, _LONGEST_SLICE = 8, 64


class Identify:
    """Pure ASGI."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        settings = current().settings
        self._identities = Identities(IdentitySettings() if settings is None else settings.identity)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass the request on without our headers, its identity in this context."""
        if _MARK in scope or scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = []
        ours: list[tuple[bytes, bytes]] = []
        authorization = b""
        for header in scope["headers"]:
            name = header[0].lower()
            if name.startswith(PREFIX):
                ours.append((name[len(PREFIX) :], header[1]))
                continue
            if name == b"authorization":
                authorization = header[1]
            headers.append(header)
        token = _identity.set(self._identities.of(scope["path"], ours, authorization))
        try:
            await self._app({**scope, "headers": headers, _MARK: True}, receive, send)
        finally:
            _identity.reset(token)


def _route(path: str) -> str:
    _, _, rest = path.partition("/v1/")
    return ROUTES.get(rest.rstrip("/"), "other")


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """ "domain=kitchen,language=en" in pairs; what has another form is left out."""
    found = [(key.strip(), value.strip()) for key, _, value in (part.partition("=") for part in text.split(","))]
    short = [(key, value) for key, value in found if key and value and max(len(key), len(value)) <= _LONGEST_SLICE]
    return tuple(short[:_MOST_SLICES])


def _text(values: set[bytes]) -> str:
    return next(iter(values), b"").decode("utf-8", "replace")

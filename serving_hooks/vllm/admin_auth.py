"""Who may ask the admin routes: whoever knows the token, from this machine."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping

from draftloop.pipeline.errors import AdminDeniedError
from draftloop.serving_hooks.vllm.settings import SwapSettings

_FORWARDED = ("x-forwarded-for", "forwarded", "x-real-ip")
_MIN_TOKEN = 16  # characters


class NoTokenError(AdminDeniedError):
    """The caller showed no token that counts."""


def require_admin(settings: SwapSettings | None, headers: Mapping[str, str], client: str | None) -> None:
    """Raise AdminDeniedError unless this call may be served. headers: lower-case names; client: address of the peer.

    The token file is read anew each time, so that a token is changed by writing the file.
    """
    if settings is None or settings.token_file is None:
        raise AdminDeniedError("no admin token is set", mend="set swap.token_file to a file that only its owner reads")
    if not settings.allow_remote:
        _require_local(headers, client)
    try:
        expected = settings.token_file.read_bytes().strip()
    except OSError as error:
        raise AdminDeniedError(f"the admin token cannot be read: {error}", mend="mend the rights of the file") from None
    if len(expected) < _MIN_TOKEN:
        raise AdminDeniedError(
            f"the admin token has fewer than {_MIN_TOKEN} characters", mend="write a long random one into the file"
        )
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), expected):
        raise NoTokenError("the admin token is missing or wrong", mend="send `Authorization: Bearer <token>`")


def _require_local(headers: Mapping[str, str], client: str | None) -> None:
    mend = "call from the engine's machine, or set swap.allow_remote"
    forwarded = [name for name in _FORWARDED if name in headers]
    if forwarded:
        raise AdminDeniedError(f"the call came through a proxy ({forwarded[0]})", mend=mend)
    if not _is_loopback(client or ""):
        raise AdminDeniedError(f"the call came from {client}", mend=mend)


def _is_loopback(client: str) -> bool:
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # how a socket for both families names an IPv4 peer
    return bool((mapped or address).is_loopback)

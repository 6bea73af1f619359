"""Who a request belongs to: the server's side decides, a client's word counts for its denial alone."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.serving_hooks.vllm import middleware
from draftloop.serving_hooks.vllm.middleware import (
    NOBODY,
    Identify,
    Identities,
    Identity,
    caller,
    internal,
    is_internal,
)
from draftloop.serving_hooks.vllm.settings import IdentitySettings

SECRET = "s3cret-of-the-gateway"
GATEWAY = {"gateway-secret": SECRET, "tenant": "acme"}
CHAT = "/v1/chat/completions"


@pytest.fixture
def known(tmp_path: Path) -> Identities:
    (tmp_path / "secret").write_text(SECRET + "\n")
    (tmp_path / "subjects").write_text("key of subjects\n")
    return Identities(
        IdentitySettings(
            default_tenant="public",
            api_keys={hashlib.sha256(b"sk-1").hexdigest(): "keyed"},
            gateway_secret_file=tmp_path / "secret",
            subject_key_file=tmp_path / "subjects",
        )
    )


def headers(named: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in named.items()]


def identity(known: Identities, named: Mapping[str, str], *, authorization: str = "", path: str = CHAT) -> Identity:
    return known.of(path, headers(named), authorization.encode())


def test_a_gateway_names_tenant_subject_conversation_and_consent(known: Identities) -> None:
    found = identity(known, {**GATEWAY, "subject": "bob", "conversation": "c-7", "consent": "Train"})
    pseudonym = hmac.new(b"key of subjects", b"bob", hashlib.sha256).hexdigest()
    assert found == Identity("acme", pseudonym, "c-7", "train", "chat")


def test_a_gateway_sorts_traffic_by_slices_of_bounded_size(known: Identities) -> None:
    assert identity(known, {**GATEWAY, "slices": "domain=kitchen, language=en"}).slices == (
        ("domain", "kitchen"),
        ("language", "en"),
    )
    odd = ",".join(["", "x", "=y", "z=", "long=" + "v" * 65, *(f"k{index}=v" for index in range(20))])
    assert identity(known, {**GATEWAY, "slices": odd}).slices == tuple((f"k{index}", "v") for index in range(8))
    assert identity(known, {"slices": "domain=kitchen"}).slices == ()


def test_without_a_secret_its_headers_are_air(known: Identities) -> None:
    said = {"tenant": "acme", "subject": "bob", "conversation": "c-7", "consent": "train"}
    assert identity(known, said) == Identity("public", "", "", None, "chat")


@pytest.mark.parametrize("secret", ["", "wrong", SECRET + "x", SECRET[:-1]])
def test_a_wrong_secret_is_a_gateway_out_of_step_whose_tenants_are_not_the_default_one(
    known: Identities, secret: str
) -> None:
    said = {"tenant": "acme", "consent": "train", "gateway-secret": secret}
    assert identity(known, said) == Identity(asserted="deny", route="chat")


@pytest.mark.parametrize("word", ["deny", "DENY", " deny ", "no", "false", ""])
def test_a_denial_counts_whoever_says_it_and_any_word_but_train_is_one(known: Identities, word: str) -> None:
    assert identity(known, {"consent": word}).asserted == "deny"
    assert identity(known, {**GATEWAY, "consent": word}).asserted == "deny"


def test_a_clients_denial_beside_the_gateways_train_denies(known: Identities) -> None:
    ours = [*headers(GATEWAY), (b"consent", b"train"), (b"consent", b"deny")]
    assert known.of(CHAT, ours, b"").asserted == "deny"


def test_a_clients_header_beside_the_gateways_makes_the_request_nobodys(known: Identities) -> None:
    for name in (b"tenant", b"subject", b"conversation"):
        ours = [*headers({**GATEWAY, "subject": "bob", "conversation": "c"}), (name, b"other"), (b"consent", b"train")]
        assert known.of(CHAT, ours, b"") == Identity(asserted="deny", route="chat")


def test_a_wrong_secret_beside_the_right_one_is_a_wrong_secret(known: Identities) -> None:
    ours = [*headers(GATEWAY), (b"gateway-secret", b"guess")]
    assert known.of(CHAT, ours, b"") == Identity(asserted="deny", route="chat")


def test_an_api_key_stands_for_its_tenant(known: Identities) -> None:
    assert identity(known, {}, authorization="Bearer sk-1").tenant == "keyed"
    assert identity(known, {}, authorization="bearer  sk-1 ").tenant == "keyed"
    assert identity(known, {}, authorization="Bearer sk-2").tenant == "public"
    assert identity(known, {}, authorization="Basic sk-1").tenant == "public"
    assert identity(known, {"gateway-secret": SECRET}, authorization="Bearer sk-1").tenant == "keyed"
    assert identity(known, GATEWAY, authorization="Bearer sk-1").tenant == "acme"


@given(
    said=st.dictionaries(st.sampled_from(["tenant", "subject", "conversation", "gateway-secret", "x"]), st.text()),
    authorization=st.binary(),
    path=st.text(),
)
def test_whatever_a_client_says_without_the_secret_it_is_the_default_tenants(
    said: dict[str, str], authorization: bytes, path: str
) -> None:
    nobody = Identities(IdentitySettings(default_tenant="public"))
    found = nobody.of(path, headers(said), authorization)
    assert found[:4] == ("public", "", "", None)


@pytest.mark.parametrize("content", ["", " \n", None])
def test_an_empty_or_absent_secret_file_trusts_nobody(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "secret").write_text(content)
    known = Identities(IdentitySettings(gateway_secret_file=tmp_path / "secret"))
    for secret in ("", " ", "x"):
        assert identity(known, {"gateway-secret": secret, "tenant": "acme"}).tenant == ""


def test_a_new_secret_is_read_and_the_old_one_is_over(
    tmp_path: Path, known: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "_LOOK_AGAIN_S", 0.0)
    assert identity(known, GATEWAY).tenant == "acme"
    (tmp_path / "secret").write_text("another")
    os.utime(tmp_path / "secret", ns=(1, 1))
    assert identity(known, GATEWAY).asserted == "deny"
    assert identity(known, {**GATEWAY, "gateway-secret": "another"}).tenant == "acme"
    (tmp_path / "secret").unlink()
    assert identity(known, {**GATEWAY, "gateway-secret": "another"}).asserted == "deny"


def test_a_subject_is_left_out_without_a_key(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    known = Identities(IdentitySettings(gateway_secret_file=tmp_path / "secret"))
    assert identity(known, {**GATEWAY, "subject": "bob"}).subject == ""


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "completions"),
        ("/v1/responses", "responses"),
        ("/v1/messages", "messages"),
        ("/behind/a/proxy/v1/chat/completions/", "chat"),
        ("/v1/embeddings", "other"),
        ("/", "other"),
        ("", "other"),
    ],
)
def test_the_route_is_told_from_the_path(known: Identities, path: str, route: str) -> None:
    assert identity(known, {}, path=path).route == route


class Seen:
    """An application that notes what reaches it."""

    def __init__(self) -> None:
        self.identity = NOBODY
        self.headers: list[tuple[bytes, bytes]] = []
        self.calls = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.calls += 1
        self.identity = await asyncio.create_task(self._later())
        self.headers = scope["headers"]

    async def _later(self) -> Identity:
        return caller()


def scope(named: Mapping[str, str]) -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": CHAT, "headers": headers(named)}


def test_the_application_sees_none_of_our_headers_and_its_tasks_know_the_caller(
    known: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    seen = Seen()
    identify = Identify(Identify(seen))  # both ways of adding it at once
    for layer in (identify, identify._app):
        layer._identities = known
    given = {f"X-Draftloop-{name}": value for name, value in GATEWAY.items()} | {"accept": "*/*"}
    before = scope(given)
    asyncio.run(identify(before, None, None))
    assert (seen.identity.tenant, seen.headers, seen.calls) == ("acme", [(b"accept", b"*/*")], 1)
    assert caller() == NOBODY
    assert len(before["headers"]) == 3  # the scope belongs to whoever made it
    assert SECRET not in caplog.text


def test_what_is_no_request_passes_untouched() -> None:
    seen = Seen()
    lifespan = {"type": "lifespan", "headers": []}
    asyncio.run(Identify(seen)(lifespan, None, None))
    assert seen.calls == 1


def test_internal_lasts_as_long_as_its_block() -> None:
    assert not is_internal()
    with internal():
        assert is_internal()
    assert not is_internal()

"""Who may ask the admin routes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftloop.pipeline.errors import AdminDeniedError, StorageError
from draftloop.serving_hooks.vllm.admin_auth import NoTokenError, require_admin
from draftloop.serving_hooks.vllm.audit import Audit
from draftloop.serving_hooks.vllm.settings import SwapSettings

TOKEN = "a-token-of-24-characters"
RIGHT = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def settings(tmp_path: Path) -> SwapSettings:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return SwapSettings(token_file=tmp_path / "token")


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_the_token_from_this_machine_is_enough(client: str, settings: SwapSettings) -> None:
    require_admin(settings, RIGHT, client)


@pytest.mark.parametrize("client", ["10.0.0.1", "::2", "", "localhost", None])
def test_from_elsewhere_the_token_is_not_enough(client: str | None, settings: SwapSettings) -> None:
    with pytest.raises(AdminDeniedError, match="the call came from"):
        require_admin(settings, RIGHT, client)
    require_admin(settings.model_copy(update={"allow_remote": True}), RIGHT, client)


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded", "x-real-ip"])
def test_a_proxy_on_this_machine_is_not_this_machine(name: str, settings: SwapSettings) -> None:
    with pytest.raises(AdminDeniedError, match="through a proxy"):
        require_admin(settings, {**RIGHT, name: "127.0.0.1"}, "127.0.0.1")


@pytest.mark.parametrize("given", ["", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer ", f"Bearer {TOKEN[:-1]}é"])
def test_any_other_token_is_wrong(given: str, settings: SwapSettings) -> None:
    with pytest.raises(NoTokenError, match="missing or wrong"):
        require_admin(settings, {"authorization": given}, "127.0.0.1")


def test_a_token_is_changed_by_writing_its_file(settings: SwapSettings) -> None:
    assert settings.token_file is not None
    settings.token_file.write_text("another-token-of-24-chars")
    with pytest.raises(NoTokenError):
        require_admin(settings, RIGHT, "127.0.0.1")
    require_admin(settings, {"authorization": "bearer another-token-of-24-chars"}, "127.0.0.1")


@pytest.mark.parametrize("text", ["", "\n", "short"])
def test_no_token_and_a_short_one_let_nobody_in(text: str, settings: SwapSettings) -> None:
    assert settings.token_file is not None
    settings.token_file.write_text(text)
    with pytest.raises(AdminDeniedError, match="fewer than 16 characters"):
        require_admin(settings, {"authorization": f"Bearer {text.strip()}"}, "127.0.0.1")


@pytest.mark.parametrize("settings", [None, SwapSettings(), SwapSettings(token_file=Path("/absent/token"))])
def test_without_a_token_file_nobody_is_let_in(settings: SwapSettings | None) -> None:
    with pytest.raises(AdminDeniedError) as raised:
        require_admin(settings, RIGHT, "127.0.0.1")
    assert raised.value.mend


def test_audit_lines_are_appended_for_their_owner_alone(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.require()
    audit.write("drafter.swap", "refused", version="2", reason='with "quotes"\nand a line')
    audit.write("drafter.swap", "done", version="3")
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(line["act"], line["outcome"], line["version"]) for line in lines] == [
        ("drafter.swap", "refused", "2"),
        ("drafter.swap", "done", "3"),
    ]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_an_audit_file_that_cannot_be_written_is_said_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="audit file"):
        Audit(tmp_path / "absent" / "audit.jsonl").require()

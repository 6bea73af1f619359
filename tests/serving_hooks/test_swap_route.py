"""What the swap route answers and writes down, whatever comes in and whatever happens behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from swap_twin import TOKEN, Site, make_site

from draftloop.serving_hooks.vllm import admin, audit, checks


class Route:
    """POST /swap of a met plug-in, and its audit file."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(admin, "current", lambda: site.runtime)
        monkeypatch.setattr(admin, "_answer", lambda body, code: (code, body))  # the web framework comes with vLLM
        self.site = site
        self.plugin = admin.AdminPlugin()
        self.ask = self.plugin._guarded(self.plugin._swap, "/swap")

    async def post(self, body: object, *, token: str = TOKEN, stream: Callable[[], Any] | None = None) -> Any:
        async def whole() -> AsyncIterator[bytes]:
            yield json.dumps(body).encode()

        headers = {"authorization": f"Bearer {token}"}
        client = SimpleNamespace(host="127.0.0.1")
        return await self.ask(SimpleNamespace(headers=headers, client=client, stream=stream or whole))

    def lines(self) -> list[dict[str, Any]]:
        file = self.site.folder / "agent" / "engine-audit.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def run(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        async def met() -> Any:
            self.plugin._swapper = self.site.start()
            await self.plugin._swapper.known()
            return await ask()

        return asyncio.run(met())


@pytest.fixture
def route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Route:
    return Route(make_site(tmp_path, monkeypatch), monkeypatch)


def test_a_swap_is_answered_and_written_down(route: Route) -> None:
    code, body = route.run(lambda: route.post({"version": "2", "digest": route.site.digests["2"]}))
    assert (code, body["version"]) == (200, "2")
    assert [(line["outcome"], line["version"], line["serving"]) for line in route.lines()] == [("done", "2", "2")]


def test_what_nobody_foresaw_is_a_failed_swap_in_answer_and_audit(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*args: Any) -> Any:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(checks, "check_version", check)
    code, body = route.run(lambda: route.post({"version": "2", "digest": route.site.digests["2"]}))
    assert (code, body["error"]["class"]) == (500, "SwapFailedError")
    assert body["error"]["message"] == "the swap failed: ZeroDivisionError: broken"
    (line,) = route.lines()
    assert (line["outcome"], line["version"], line["reason"], line["serving"]) == (
        "failed",
        "2",
        "ZeroDivisionError: broken",
        "boot",
    )
    assert route.site.runtime.swaps == {"failed": 1}


def test_a_caller_that_hangs_up_in_its_body_is_written_down(route: Route) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionResetError("gone")

    code, body = route.run(lambda: route.post({}, stream=broken))
    assert (code, body["error"]["class"]) == (500, "SwapFailedError")
    assert [(line["outcome"], line["reason"]) for line in route.lines()] == [("failed", "ConnectionResetError: gone")]


def test_a_staged_folder_that_cannot_be_read_is_refused(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path.name == "2":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    code, body = route.run(lambda: route.post({"version": "2", "digest": route.site.digests["2"]}))
    assert (code, body["error"]["class"]) == (422, "CheckpointError")
    assert "Permission denied" in body["error"]["message"]
    assert [line["outcome"] for line in route.lines()] == ["refused"]


def counted(lines: list[dict[str, Any]]) -> list[int]:
    """Calls each line stands for."""
    said = "the admin token is missing or wrong"
    assert {(line["outcome"], line["version"], line["reason"].partition("; ")[0]) for line in lines} <= {
        ("denied", None, said)
    }
    rests = [line["reason"].removeprefix(said) for line in lines]
    return [1 if not rest else int(rest.removeprefix("; ").partition(" ")[0]) for rest in rests]


def test_denials_are_written_once_in_a_while_and_each_is_counted(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "DENIALS_S", 0.2)

    async def flood() -> list[list[int]]:
        found = []
        assert (await route.post({}, token="wrong"))[0] == 401
        found.append(counted(route.lines()))  # on disk before the answer
        await asyncio.gather(*(route.post({}, token="wrong") for _ in range(300)))
        found.append(counted(route.lines()))
        await asyncio.sleep(0.3)
        found.append(counted(route.lines()))
        await asyncio.sleep(0.5)  # quiet
        await route.post({}, token="wrong")
        found.append(counted(route.lines()))
        return found

    assert route.run(flood) == [[1], [1], [1, 300], [1, 300, 1]]


def test_denials_not_yet_written_are_when_the_server_ends(route: Route) -> None:
    async def some() -> None:
        for _ in range(4):
            await route.post({}, token="wrong")

    route.run(some)
    assert counted(route.lines()) == [1, 3]


def test_denials_the_disk_does_not_take_are_counted_later(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "DENIALS_S", 0.05)
    file = route.site.folder / "agent" / "engine-audit.jsonl"

    async def some() -> None:
        file.mkdir()
        for _ in range(3):
            assert (await route.post({}, token="wrong"))[0] == 401
        await asyncio.sleep(0.2)
        file.rmdir()
        await route.post({}, token="wrong")

    route.run(some)
    assert counted(route.lines()) == [4]

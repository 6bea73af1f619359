"""The client of the admin route against its in-tree twin: every answer of the contract, and answers that never come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_twin import AdminTwin, serving
from samples import FINGERPRINT

from draftloop.pipeline import artifact, errors
from draftloop.pipeline.errors import (
    AdminDeniedError,
    CheckpointError,
    ConfigError,
    EngineUnreachableError,
    EngineUnsupportedError,
    ReplicaLostError,
    SwapBusyError,
    SwapFailedError,
    SwapRefusedError,
)
from draftloop.pipeline.records import Condition, SpecCounters, Swapped
from draftloop.pipeline.rollout.engine_client import FakeEngine
from draftloop.pipeline.rollout.vllm_client import VllmClient


@pytest.fixture
def twin() -> Iterator[AdminTwin]:
    with serving(AdminTwin(FakeEngine(FINGERPRINT, version="1", digest_of={"2": "tensors-2"}))) as twin:
        yield twin


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "admin.token"
    path.write_text("secret\n")
    return path


@pytest.fixture
def client(twin: AdminTwin, token_file: Path) -> VllmClient:
    return VllmClient(twin.url, token_file, timeout_s=5, swap_timeout_s=5)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A complete drafter folder."""
    final = tmp_path / "drafters" / "2"
    with artifact.staging(final) as draft:
        (draft / "model.safetensors").write_bytes(b"2")
        artifact.publish(draft, final, {})
    return final


def test_status_is_what_the_agent_asks_for(twin: AdminTwin, client: VllmClient) -> None:
    twin.engine.serve(num_steps=10)
    assert client.fingerprint() == FINGERPRINT
    assert client.drafter_version() == "1"
    assert client.counters() == SpecCounters(10, 10, 40, 0)
    assert client.condition() == Condition("first", "1", "", "", None)


def test_a_swap_names_version_and_digest_and_never_a_path(twin: AdminTwin, client: VllmClient, second: Path) -> None:
    assert client.swap(second, "2") == Swapped("tensors-2", 40.0)
    asked = [body for path, body in twin.requests if path.endswith("/swap")]
    assert asked == [{"version": "2", "digest": (second / artifact.MARKER).read_text()}]
    assert str(second) not in str(twin.requests)


def test_without_a_drafter_vllm_cannot_serve(twin: AdminTwin, client: VllmClient) -> None:
    with pytest.raises(SwapRefusedError, match="cannot serve without"):
        client.swap(None, None)
    assert twin.requests == []


def test_a_folder_that_is_not_complete_is_not_asked_for(twin: AdminTwin, client: VllmClient, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete drafter"):
        client.swap(tmp_path, "2")
    assert twin.requests == []


@pytest.mark.parametrize(
    "name",
    [
        "AdminDeniedError",
        "SwapBusyError",
        "SwapRefusedError",
        "CheckpointError",
        "FingerprintMismatchError",
        "SwapFailedError",
        "ReplicaLostError",
        "EngineUnsupportedError",
    ],
)
def test_every_error_of_the_contract_comes_back_as_its_own_class(
    name: str, twin: AdminTwin, client: VllmClient, second: Path
) -> None:
    twin.fault = name
    with pytest.raises(errors.DraftloopError, match=f"told to answer {name}") as caught:
        client.swap(second, "2")
    assert (type(caught.value).__name__, caught.value.mend) == (name, "mend it")


def test_the_token_is_read_anew_for_each_call(twin: AdminTwin, client: VllmClient, token_file: Path) -> None:
    twin.token = "renewed"
    with pytest.raises(AdminDeniedError, match="missing or wrong"):
        client.drafter_version()
    token_file.write_text("renewed")
    assert client.drafter_version() == "1"


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", "zwölf".encode()])
def test_a_token_file_without_a_token_is_named(content: bytes, client: VllmClient, token_file: Path) -> None:
    token_file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"admin\.token"):
        client.drafter_version()


def test_a_swap_whose_answer_is_lost_is_read_from_status(twin: AdminTwin, client: VllmClient, second: Path) -> None:
    twin.fault = "lose"
    assert client.swap(second, "2").tensors == "tensors-2"
    assert [path for path, _ in twin.requests].count("/draftloop/v1/swap") == 1


def test_a_swap_that_never_arrived_is_asked_for_again(twin: AdminTwin, client: VllmClient, second: Path) -> None:
    twin.fault = "drop"
    assert client.swap(second, "2") == Swapped("tensors-2", 40.0)


def test_a_lost_answer_of_an_engine_that_needs_a_restart_says_so(
    twin: AdminTwin, client: VllmClient, second: Path
) -> None:
    twin.fault, twin.engine.restart_needed = "drop", "the update was left half done"
    with pytest.raises(ReplicaLostError, match="half done"):
        client.swap(second, "2")


def test_an_engine_that_restarts_during_the_swap_is_told_apart(
    twin: AdminTwin, client: VllmClient, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin.fault = "drop"
    original, boots = AdminTwin._status, iter(["first", "second", "second"])

    def status(self: AdminTwin) -> dict[str, Any]:
        return {**original(self), "boot_id": next(boots)}

    monkeypatch.setattr(AdminTwin, "_status", status)
    with pytest.raises(EngineUnreachableError, match="went away during the swap to version 2"):
        client.swap(second, "2")


def test_a_swap_that_still_runs_is_waited_for(twin: AdminTwin, client: VllmClient, second: Path) -> None:
    twin.swapping = True
    timer = threading.Timer(0.3, lambda: setattr(twin, "swapping", False))
    timer.start()
    assert client.swap(second, "2").tensors == "tensors-2"
    timer.join()


def test_a_swap_that_never_ends_is_busy(twin: AdminTwin, token_file: Path, second: Path) -> None:
    twin.swapping = True
    with pytest.raises(SwapBusyError, match="all the time"):
        VllmClient(twin.url, token_file, swap_timeout_s=0.1).swap(second, "2")


def test_what_serves_is_not_told_before_a_swap_has_ended(twin: AdminTwin, client: VllmClient, second: Path) -> None:
    twin.leave({"version": "2", "digest": (second / artifact.MARKER).read_text()}, begun=True)
    timer = threading.Timer(0.3, twin.finish)
    timer.start()
    assert client.condition().version == "2"
    timer.join()


def test_while_a_swap_does_not_end_nobody_knows_what_serves(twin: AdminTwin, token_file: Path) -> None:
    twin.swapping = True
    client = VllmClient(twin.url, token_file, swap_timeout_s=0.1)
    for ask in (client.condition, client.drafter_version):
        with pytest.raises(SwapBusyError, match="all the time"):
            ask()


def test_a_swap_of_ours_that_does_not_end_is_not_known_to_be_refused(
    twin: AdminTwin, token_file: Path, second: Path
) -> None:
    twin.swap_fault = "begin"
    with pytest.raises(EngineUnreachableError, match="nobody knows how the swap to version 2 went"):
        VllmClient(twin.url, token_file, swap_timeout_s=0.1).swap(second, "2")


def test_a_lost_swap_that_only_begins_when_asked_again_is_not_known_to_be_refused(
    twin: AdminTwin, client: VllmClient, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin.swap_fault = "queue"
    original = VllmClient._ask_for

    def ask_for(self: VllmClient, version: str, digest: str) -> Swapped:
        twin.swapping = twin.pending is not None
        return original(self, version, digest)

    monkeypatch.setattr(VllmClient, "_ask_for", ask_for)
    with pytest.raises(EngineUnreachableError, match="another swap is under way"):
        client.swap(second, "2")


def test_a_token_renewed_while_the_answer_was_lost_leaves_the_outcome_open(
    twin: AdminTwin, client: VllmClient, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin.swap_fault = "begin"
    original = AdminTwin.leave

    def leave(self: AdminTwin, body: dict[str, Any], *, begun: bool) -> None:
        original(self, body, begun=begun)
        self.token = "renewed"

    monkeypatch.setattr(AdminTwin, "leave", leave)
    with pytest.raises(EngineUnreachableError, match="the admin token is missing or wrong"):
        client.swap(second, "2")


def test_nothing_at_the_address_is_unreachable(token_file: Path) -> None:
    with pytest.raises(EngineUnreachableError, match=r"nothing answers at http://127\.0\.0\.1:9"):
        VllmClient("http://127.0.0.1:9", token_file, timeout_s=2).drafter_version()


def test_an_engine_without_the_plug_in_is_named_with_what_to_set(
    twin: AdminTwin, client: VllmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: AdminTwin, path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise FileNotFoundError

    monkeypatch.setattr(AdminTwin, "answer", missing)
    with pytest.raises(EngineUnsupportedError, match="has no route /status") as caught:
        client.drafter_version()
    assert "VLLM_PLUGINS=draftloop" in str(caught.value.mend)


def test_a_plug_in_in_trouble_says_which(twin: AdminTwin, client: VllmClient) -> None:
    twin.trouble = {"class": "ConfigError", "message": "no fingerprint in target.json", "mend": "write it"}
    with pytest.raises(EngineUnsupportedError, match=r"no fingerprint in target\.json"):
        client.fingerprint()
    twin.engine.version = None
    with pytest.raises(EngineUnsupportedError, match=r"no fingerprint in target\.json"):
        client.condition()  # or an agent would take it for an engine without a drafter


def test_another_form_of_status_is_unsupported(
    twin: AdminTwin, client: VllmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdminTwin, "_status", lambda self: {"version": 2})
    with pytest.raises(EngineUnsupportedError, match="another form"):
        client.drafter_version()


def test_a_failed_swap_twice_lost_says_so(
    twin: AdminTwin, client: VllmClient, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdminTwin, "fault", property(lambda self: "drop", lambda self, value: None))
    with pytest.raises(SwapFailedError, match="answers to a swap to version 2 are lost"):
        client.swap(second, "2")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://user:pw@host", "http://host/v1"])
def test_an_address_that_is_none_is_refused(url: str, token_file: Path) -> None:
    with pytest.raises(ConfigError, match="engine address"):
        VllmClient(url, token_file)


def test_texts_are_tokenized_by_the_engine(client: VllmClient) -> None:
    assert client.tokenize(["a bc", "def"]) == [(1, 2), (3,)]

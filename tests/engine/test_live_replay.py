"""Replay is the engine: the same drafts accepted at the same steps, request by request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from live_site import LiveServer, TinySite  # noqa: E402

from draftloop.pipeline.completions import Completions  # noqa: E402
from draftloop.pipeline.data.snapshot import Row  # noqa: E402
from draftloop.pipeline.judge.replay import replay  # noqa: E402
from draftloop.pipeline.records import CapturedRequest, Sampling, unpack_ids  # noqa: E402
from draftloop.pipeline.vllm_server import MODEL_NAME  # noqa: E402
from draftloop.serving_hooks.embedded.types import Request  # noqa: E402
from draftloop.trainers.checkpoint import open_drafter  # noqa: E402

pytestmark = pytest.mark.engine

NUM_REQUESTS = 220


@pytest.fixture
def client(live: LiveServer) -> Iterator[Completions]:
    made = Completions(
        live.url,
        MODEL_NAME,
        streams=8,
        headers_of=lambda request: live.gateway(conversation=request.conversation_id),
    )
    yield made
    made.close()


def asked() -> list[Request]:
    """Prompts of 5 to 300 tokens (some prefilled in chunks), outputs of up to 24 to 43 tokens."""
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            f"replayed-{index}",
            tuple(torch.randint(20, 49000, (5 + index * 3 % 300,), generator=generator).tolist()),
            Sampling(max_tokens=24 + index % 20),
            conversation_id=f"replayed-{index}",
        )
        for index in range(NUM_REQUESTS)
    ]


def row_of(record: CapturedRequest) -> Row:
    ids = unpack_ids(record.prompt_ids), unpack_ids(record.output_ids)
    return Row(record.record_id, record.conversation_id, *ids, {}, 0.0, [])


def test_replay_of_captured_requests_takes_the_steps_the_engine_took(
    live: LiveServer, tiny: TinySite, client: Completions
) -> None:
    answers = client.run(asked())
    captured: list[CapturedRequest] = []
    deadline = time.monotonic() + 30
    while len(captured) < NUM_REQUESTS and time.monotonic() < deadline:  # other tests' records lie there too
        captured = [each for each in live.records() if each.conversation_id.startswith("replayed-")]
    assert len(captured) == NUM_REQUESTS
    by_conversation = {record.conversation_id: record for record in captured}
    for answer in answers:
        record = by_conversation[answer.request_id]
        assert tuple(unpack_ids(record.prompt_ids)) == answer.prompt_ids
        assert tuple(unpack_ids(record.output_ids)) == answer.output_ids
    drafter = open_drafter(tiny.place("boot"), fingerprint=tiny.fingerprint)
    report = replay(tiny.target, {"live": drafter}, [row_of(each) for each in captured], k=4, snapshot_id="live")
    steps = {request.record_id: request.num_steps for request in report["live"].requests}
    assert steps == {record.record_id: len(record.accepted) for record in captured}  # fp32: not one step apart
    emitted = sum(len(answer.output_ids) - 1 for answer in answers)
    assert report["live"].tau == emitted / sum(steps.values())


def test_the_files_of_the_live_drafter_are_the_ones_that_were_replayed(live: LiveServer, tiny: TinySite) -> None:
    status = live.status()
    assert (status["drafter"]["version"], status["drafter"]["digest"]) == ("boot", tiny.digest("boot"))
    assert Path(tiny.live).resolve() == tiny.place("boot").resolve()

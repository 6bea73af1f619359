"""A vLLM server over two drafters, thrown up for a bench, and how its numbers are told."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftloop.pipeline.completions import Completions
from draftloop.pipeline.engine_files import make_first_drafter
from draftloop.pipeline.errors import EngineError
from draftloop.pipeline.judge.verdict import public_key_path
from draftloop.pipeline.rollout.journal import Journal
from draftloop.pipeline.rollout.vllm_client import PREFIX, VllmClient
from draftloop.pipeline.traffic import domain_requests
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.vllm_server import MODEL_NAME, VllmServer, request_json, write_serving
from draftloop.pipeline.vllm_service import gateway_headers, wait_until_known
from draftloop.pipeline.workspace import Workspace
from draftloop.serving_hooks.embedded.types import Request
from draftloop.serving_hooks.vllm.settings import CaptureSettings, SwapSettings
from draftloop.trainers.checkpoint import open_drafter, publish_drafter
from draftloop.trainers.target import Target

A, B = "a", "b"
NOISE = 0.05  # of the second drafter's matrices where none is given, in units of their own spread
NUM_PROMPTS = 24


@dataclass
class Site:
    """A server of its own over two drafters, in a folder that is thrown away first."""

    workspace: Workspace
    target: Target
    journal: Journal
    server: VllmServer
    client: VllmClient
    completions: Completions
    requests: list[Request]
    token: Path

    def admin(self, path: str, body: object) -> Any:
        """POST to the admin route. Raises EngineError for another answer than 200."""
        headers = {"authorization": f"Bearer {self.token.read_text().strip()}"}
        code, answer = request_json(f"{self.server.url}{PREFIX}{path}", body, headers=headers)
        if code != 200:
            raise EngineError(f"{path} answered {code}: {answer}")
        return answer


@contextmanager
def open_site(
    workspace: Workspace,
    folder: Path,
    drafter: Path | None,
    other: Path | None,
    *,
    streams: int,
    max_tokens: int,
    screen: Screen,
) -> Iterator[Site]:
    """Start a server over copies of the drafters; capture goes into a SQLite log of its own.

    drafter None: an untrained one; other None: the first with a little noise. Raises as VllmServer and open_drafter.
    """
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    target = workspace.load_target()
    journal = Journal(folder / "agent")
    _place(workspace, target, journal, drafter, other)
    config = workspace.config
    own = Workspace(config.model_copy(update={"work": folder}))
    own.open_log().close()
    own.signing_key()
    files = write_serving(
        folder / "serving",
        target.fingerprint,
        consent=config.consent,
        capture=CaptureSettings(topic=own.raw_topic(), sqlite=folder / "capture.db", limits=config.capture),
        swap=SwapSettings(staging=journal.drafters, public_key=public_key_path(folder / "gate.key")),
    )
    server = VllmServer(
        config.vllm.model_copy(update={"max_num_seqs": max(streams, config.vllm.max_num_seqs)}),
        folder,
        target=Path(target.folder),
        dtype=target.fingerprint.dtype,
        drafter=journal.live,
        num_speculative_tokens=config.replay.num_speculative_tokens,
        serving=files.settings,
    )
    secret = files.gateway_secret.read_text().strip()
    screen.say(f"a vLLM server starts, log {server.log}")
    with server:
        completions = Completions(
            server.url, MODEL_NAME, streams=streams, headers_of=lambda request: gateway_headers(request, secret)
        )
        client = VllmClient(server.url, files.token)
        try:
            wait_until_known(client)
            requests = _requests(target, config.seed, max_tokens)
            yield Site(own, target, journal, server, client, completions, requests, files.token)
        finally:
            completions.close()


def _place(workspace: Workspace, target: Target, journal: Journal, drafter: Path | None, other: Path | None) -> None:
    """Both drafters into the agent's folder, `live` at the first."""
    if drafter is None:
        make_first_drafter(workspace, journal.place(A), target)
    else:
        shutil.copytree(drafter, journal.place(A))
    first = open_drafter(journal.place(A), fingerprint=target.fingerprint)
    if other is not None:
        shutil.copytree(other, journal.place(B))
        open_drafter(journal.place(B), fingerprint=target.fingerprint)
    else:
        generator = torch.Generator().manual_seed(workspace.config.seed)
        with torch.no_grad():
            for parameter in first.model.parameters():
                if parameter.dim() == 2:
                    parameter.add_(NOISE * parameter.std() * torch.randn(parameter.shape, generator=generator))
        training = {**first.manifest.training, "noise": NOISE}
        publish_drafter(
            journal.place(B),
            first.model,
            fingerprint=target.fingerprint,
            snapshot_id=None,
            parents=[first.digest],
            training=training,
        )
    journal.point_live(A)


def _requests(target: Target, seed: int, max_tokens: int) -> list[Request]:
    halves = [
        domain_requests(target, domain, count=NUM_PROMPTS // 2, round_number=0, seed=seed, max_tokens=max_tokens)
        for domain in ("kitchen", "python")
    ]
    return [request for pair in zip(*halves, strict=True) for request in pair]


def median_interval(values: Sequence[float], *, seed: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (4000, len(values)), generator=generator)
    medians = torch.tensor(list(values), dtype=torch.float64)[drawn].quantile(0.5, dim=1)
    tail = (1 - confidence) / 2
    low, high = medians.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def spread(values: Sequence[float]) -> dict[str, float]:
    """Count, median, p99 and maximum."""
    if not values:
        return {"count": 0, "median": 0.0, "p99": 0.0, "max": 0.0}
    found = sorted(values)
    p99 = found[min(len(found) - 1, round(0.99 * (len(found) - 1)))]
    return {"count": len(found), "median": statistics.median(found), "p99": p99, "max": found[-1]}

"""One real vLLM server a session, over a tiny target with drafters whose acceptance is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from live_site import LiveServer, TinySite, make_server, make_site

from draftloop.pipeline.rollout.vllm_client import VllmClient
from draftloop.pipeline.vllm_service import wait_until_known

CHECKOUT = Path(__file__).resolve().parents[2]
# Tools of the OpenAI API can be called; a prompt of more than 256 tokens is prefilled in chunks.
EXTRA = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The Python of an environment with vLLM and this package; skips with how to get one."""
    python = Path(os.environ.get("DRAFTLOOP_ENGINE_PYTHON") or CHECKOUT / ".venv-engine" / "bin" / "python")
    if not python.exists():
        pytest.skip(f"no engine at {python}: make engine, or set DRAFTLOOP_ENGINE_PYTHON to a Python that has vLLM")
    return python


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinySite:
    """The tiny target in fp32 with drafters boot, 2 and 3. Tests publish versions of their own names."""
    return make_site(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def live(engine_python: Path, tiny: TinySite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The session's server, booted with `boot`. Whoever swaps swaps boot back, whoever stops it starts it again."""
    made = make_server(tiny, engine_python, tmp_path_factory.mktemp("live"), extra_args=EXTRA)
    made.server.start()
    wait_until_known(VllmClient(made.url, made.files.token))
    yield made
    made.server.stop()

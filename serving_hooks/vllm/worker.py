"""What the API process asks of the workers by `collective_rpc`. On their own base class, so that no flag is needed."""

from __future__ import annotations

from typing import Any

from draftloop.pipeline.errors import EngineUnsupportedError
from draftloop.serving_hooks.vllm import proof, versions
from draftloop.serving_hooks.vllm.transport import DraftDisk

SAMPLE = 16  # columns of each packed weight looked at while requests wait


def install() -> None:
    """Any number of calls."""
    base = versions.worker_base()
    for method in (
        draftloop_stage,
        draftloop_staged,
        draftloop_adopt,
        draftloop_abort,
        draftloop_pieces,
        draftloop_differing,
        draftloop_inspect,
    ):
        setattr(base, method.__name__, method)


def draftloop_stage(worker: Any, path: str, sha256: str) -> bool:
    """Begin to read a weights file while requests run; False where the last one is still being read."""
    return _transport(worker).stage(path, sha256)


def draftloop_staged(worker: Any) -> dict[str, str | None] | None:
    """How reading ended; None while it goes on."""
    return _transport(worker).staged()


def draftloop_adopt(worker: Any) -> None:
    """The staged drafter serves from now on."""
    _transport(worker).adopt()


def draftloop_abort(worker: Any) -> None:
    """End a session of weights that broke, so that another can begin."""
    _transport(worker).abort(worker.get_draft_model())
    versions.end_session(worker)


def draftloop_pieces(worker: Any, slot: str) -> dict[str, int]:
    """The tensors of that copy, and in how many calls each is compared."""
    return proof.pieces(worker.get_draft_model(), _copy(worker, slot).tensors)


def draftloop_differing(worker: Any, slot: str, name: str | None = None, piece: int = 0) -> list[str]:
    """Which tensors of that copy are not what the engine drafts with.

    Without a name all tensors, of packed weights a sample; with a name this piece of that one.
    """
    tensors = _copy(worker, slot).tensors
    model = worker.get_draft_model()
    if name is None:
        return [*proof.differing(model, tensors, SAMPLE), *proof.stale_buffers(model)]
    return proof.differing(model, {name: tensors[name]}, piece=piece)


def draftloop_inspect(worker: Any) -> dict[str, Any]:
    """What this worker computes with, read out whole: {"drafter", "differing", "target", "rss_bytes", "fused"}.

    drafter: digest of the copy that serves; differing: tensors in which the live drafter is not that copy; target:
    digest of the target's weights; fused: address of each derived buffer.
    """
    copy = _transport(worker).copies.get("serving")
    draft = worker.get_draft_model()
    return {
        "drafter": copy.digest if copy else None,
        "differing": [*proof.differing(draft, copy.tensors), *proof.stale_buffers(draft)] if copy else [],
        "target": proof.model_digest(worker.get_model()),
        "rss_bytes": _rss_bytes(),
        "fused": {name: value.data_ptr() for name, value in proof.fused_buffers(draft)},
    }


def _transport(worker: Any) -> DraftDisk:
    transport = worker.weight_transfer_engine
    if not isinstance(transport, DraftDisk):
        raise EngineUnsupportedError("the engine was started without draft_disk")
    return transport


def _copy(worker: Any, slot: str) -> Any:
    return _transport(worker).copies["serving" if slot == "serving" else "staged"]


def _rss_bytes() -> int:
    with open("/proc/self/status") as stream:
        for line in stream:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0

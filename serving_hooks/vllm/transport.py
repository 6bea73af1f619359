"""How a drafter's weights get from a file into a worker: read once, ahead of time, and loaded from memory.

Each worker reads the file while requests run and holds two copies in memory, the drafter that serves and the one that
comes, so that nothing on a disk decides how a swap, or its undoing, ends.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from draftloop.pipeline.errors import CheckpointError, DraftloopError, SwapFailedError
from draftloop.serving_hooks.vllm import proof, versions

BACKEND = "draft_disk"
Slot = Literal["serving", "staged"]


def install() -> None:
    """Make `--weight-transfer-config '{"backend":"draft_disk"}'` known. Any number of calls."""
    factory = versions.transfer_factory()
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, DraftDisk)


@dataclass(frozen=True)
class Copy:
    """A drafter's tensors in this worker's memory."""

    digest: str  # of the tensors, as a manifest names them
    tensors: dict[str, Tensor]


@dataclass
class NoInfo:
    """Nothing has to be agreed on before the first swap."""


@dataclass
class FromSlot:
    """Which of the two copies to load."""

    slot: Slot


class DraftDisk(WeightTransferEngine):  # type: ignore[misc]
    """What vLLM drives in each worker: start, one update, finish."""

    init_info_cls = NoInfo
    update_info_cls = FromSlot
    supports_draft_weight_update = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.copies: dict[Slot, Copy] = {}
        self._reading: threading.Thread | None = None
        self._error: DraftloopError | None = None
        self._turn = 0  # of the read whose outcome counts
        self._ending = threading.Lock()

    # Reading, while requests run.

    def stage(self, path: str, sha256: str) -> bool:
        """Begin to read a weights file into the staged slot; False where the last one is still being read.

        Never waits: requests stand still meanwhile, and a file system that hangs would keep the engine for good.
        """
        if self._reading is not None and self._reading.is_alive():
            return False
        with self._ending:
            self._turn += 1
            self._error = None
            self.copies.pop("staged", None)
        self._reading = threading.Thread(
            target=self._read, args=(self._turn, Path(path), sha256), name="draftloop-stage", daemon=True
        )
        self._reading.start()
        return True

    def staged(self) -> dict[str, str | None] | None:
        """How reading ended: {"digest", "error", "mend"}; None while it goes on."""
        if self._reading is not None and self._reading.is_alive():
            return None
        copy, error = self.copies.get("staged"), self._error
        return {
            "digest": copy.digest if copy else None,
            "error": error.message if error else None,
            "mend": error.mend if error else None,
        }

    def adopt(self) -> None:
        """The staged copy serves from now on; the one that did is let go."""
        self.copies["serving"] = self.copies.pop("staged")

    def _read(self, turn: int, path: Path, sha256: str) -> None:
        copy: Copy | None = None
        error: DraftloopError | None = None
        try:
            copy = read_copy(path, sha256)
        except DraftloopError as raised:
            error = raised
        with self._ending:
            if turn != self._turn:  # late: the slot is another read's by now
                return
            self._error = error
            if copy is not None:
                self.copies["staged"] = copy

    # Loading, while no request runs.

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing to agree on."""

    def start_weight_update(self) -> None:
        """Let vLLM collect the weights of each layer anew."""
        if not _in_place(self.model):
            versions.layerwise().initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FromSlot) -> None:
        """Load the whole drafter. If that fails the modules get their own weights back, some of them new ones."""
        try:
            copy = self.copies.get(update_info.slot)
            if copy is None:
                raise SwapFailedError(f"no drafter is held as {update_info.slot}")
            self.model.load_weights(iter(copy.tensors.items()))
            if _in_place(self.model):
                _pack_again(self.model)
        except BaseException:
            self.abort(self.model)
            raise

    def finish_weight_update(self) -> None:
        """Let vLLM put every layer's new weights where its old ones lay."""
        if not _in_place(self.model):
            versions.layerwise().finalize_layerwise_reload(self.model, self.model_config)

    def abort(self, model: nn.Module) -> None:
        """Give layers that still wait for weights those that they had."""
        if not _in_place(model):
            _put_back(model)

    def shutdown(self) -> None:
        """Nothing is held open."""


def read_copy(path: Path, sha256: str) -> Copy:
    """Read a weights file once; the bytes that are loaded are the bytes that were checked. Raises CheckpointError."""
    mend = "stage the version again; nothing was changed"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read by the worker: {error}", mend=mend) from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CheckpointError(
            f"{path} was changed between check and load: sha256 {found}, checked was {sha256}", mend=mend
        )
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}", mend=mend) from None
    return Copy(proof.tensor_digest(tensors), tensors)


def _in_place(model: nn.Module) -> bool:
    """Whether a drafter derives tensors when loaded: vLLM, going layer by layer, has emptied their sources by then."""
    return any(True for _ in proof.fused_buffers(model))


def _pack_again(model: nn.Module) -> None:
    """On CPU a head is computed from a packed copy, which loading in place leaves as it was."""
    head: Any = model.get_submodule("lm_head") if hasattr(model, "lm_head") else None
    if head is not None and proof.is_packed(head) and head.weight.numel():
        head.quant_method.process_weights_after_loading(head)


@torch.no_grad()
def _put_back(model: nn.Module) -> None:
    """End a session that broke: layers still waiting for weights get the ones they had."""
    layerwise = versions.layerwise()
    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        if info.can_load():
            layerwise._place_kernel_tensors(module, info)
            info.reset()

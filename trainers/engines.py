"""How gradients become a step: plain (one process or DDP through Accelerate) or DeepSpeed, behind one small interface.

Both refuse to move on a gradient that is not finite, take the learning rate as an argument (there is no scheduler
object to restore), and save all they need to continue bit for bit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftloop.pipeline.errors import CheckpointError, ConfigError
from draftloop.trainers.config import TrainConfig
from draftloop.trainers.objective import Objective

_WEIGHTS = "weights.safetensors"
_MOMENTS = "moments.safetensors"


class TrainEngine(Protocol):
    """One optimizer over an Objective, on one of `world_size` ranks."""

    kind: str
    rank: int
    world_size: int
    device: torch.device

    def loss(self, batch: Any) -> Tensor:
        """Forward through whatever wraps the objective."""
        ...

    def backward(self, loss: Tensor) -> float:
        """Gradients of the loss, averaged over ranks; their norm, inf or nan where one is not finite on any rank."""
        ...

    def step(self, learning_rate: float) -> None:
        """Move the parameters."""
        ...

    def sum(self, values: list[float]) -> list[float]:
        """Elementwise sum over ranks."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state; called on every rank."""
        ...

    def load(self, folder: Path) -> None:
        """The inverse of save. Raises CheckpointError."""
        ...


def make_engine(objective: Objective, config: TrainConfig) -> TrainEngine:
    """The engine the settings ask for. Raises ConfigError for a DeepSpeed file that cannot serve."""
    if config.deepspeed is not None:
        return DeepSpeedEngine(objective, config, read_deepspeed(config.deepspeed, config))
    return PlainEngine(objective, config)


def read_deepspeed(path: Path, config: TrainConfig) -> dict[str, Any]:
    """A DeepSpeed JSON with its "auto" values filled from our settings. Raises ConfigError."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"train.deepspeed = {path}: {error}", mend="name a readable DeepSpeed JSON file") from error
    own = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": config.grad_clip}
    for key, value in own.items():
        if values.setdefault(key, value) == "auto":
            values[key] = value
    if values["gradient_accumulation_steps"] != 1:
        raise ConfigError(
            f"{path}: gradient_accumulation_steps = {values['gradient_accumulation_steps']}",
            mend="set it to 1 or auto and raise train.tokens_per_batch instead",
        )
    if values.get("zero_optimization", {}).get("stage", 0) > 2:
        raise ConfigError(
            f"{path}: zero_optimization.stage = 3",
            mend="use stage 1 or 2: a drafter is small, the target is not wrapped",
        )
    for key in ("optimizer", "scheduler"):
        if key in values:
            raise ConfigError(f"{path}: {key!r} is set", mend="remove it: train.learning_rate and betas rule")
    return values


def _optimizer(objective: Objective, config: TrainConfig, *, fused: bool) -> torch.optim.AdamW:
    parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, fused=fused
    )


def _set_rate(optimizer: Any, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class _Ranks:
    """What both engines need of the other ranks."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        # Asked of torch, not of Accelerate: with DeepSpeed on CPU Accelerate calls every rank the first of one.
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank: int = torch.distributed.get_rank() if ranks else 0
        self.world_size: int = torch.distributed.get_world_size() if ranks else 1
        self.device: torch.device = accelerator.device

    def sum(self, values: list[float]) -> list[float]:
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(tensor)
        result: list[float] = tensor.tolist()
        return result

    def barrier(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier()


class PlainEngine(_Ranks):
    """fp32 parameters and moments, fused AdamW; DDP where there are several ranks."""

    kind = "plain"

    def __init__(self, objective: Objective, config: TrainConfig) -> None:
        from accelerate import Accelerator

        super().__init__(Accelerator(cpu=not torch.cuda.is_available()))
        self._objective = objective
        optimizer = _optimizer(objective.to(self.device), config, fused=True)
        self._wrapped, self._optimizer = self.accelerator.prepare(objective, optimizer)
        self._clip = config.grad_clip

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self._wrapped(batch)
        return loss

    def backward(self, loss: Tensor) -> float:
        self._optimizer.zero_grad()
        self.accelerator.backward(loss)
        return float(self.accelerator.clip_grad_norm_(self._wrapped.parameters(), self._clip))

    def step(self, learning_rate: float) -> None:
        _set_rate(self._optimizer, learning_rate)
        self._optimizer.step()

    def save(self, folder: Path) -> None:
        if self.rank:
            return
        save_file({name: value.contiguous() for name, value in self._objective.state_dict().items()}, folder / _WEIGHTS)
        moments: dict[str, Tensor] = {}
        for name, parameter in self._named():
            for key, value in self._optimizer.state[parameter].items():
                moments[f"{key}/{name}"] = value.contiguous()
        save_file(moments, folder / _MOMENTS)

    def load(self, folder: Path) -> None:
        self._objective.load_state_dict(load_file(folder / _WEIGHTS))
        moments = load_file(folder / _MOMENTS)
        for name, parameter in self._named():
            keys = [key for key in moments if key.split("/", 1)[1] == name]
            if not keys:
                raise CheckpointError(f"state {folder} holds no moments of {name}", mend="remove it and start again")
            self._optimizer.state[parameter] = {
                key.split("/", 1)[0]: moments[key].to("cpu" if key.startswith("step/") else parameter.device)
                for key in keys
            }

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [item for item in self._objective.named_parameters() if item[1].requires_grad]


class DeepSpeedEngine(_Ranks):
    """ZeRO 1 or 2 from the user's JSON, wrapped by Accelerate; started under torchrun."""

    kind = "deepspeed"

    def __init__(self, objective: Objective, config: TrainConfig, settings: dict[str, Any]) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        skip_cpu_compile()
        # Accelerator(cpu=True) would drop DeepSpeed without a word: DS_ACCELERATOR=cpu in the environment chooses.
        super().__init__(Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings)))
        self._square = torch.zeros((), device=self.device)
        optimizer = _optimizer(objective.to(self.device), config, fused=False)
        self._wrapped, self._optimizer = self.accelerator.prepare(objective, optimizer)
        for parameter in objective.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._look)

    def _look(self, gradient: Tensor) -> None:
        """Local gradients as autograd makes them: ZeRO clips and steps in one call, which would be too late."""
        self._square += gradient.detach().float().pow(2).sum()

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self._wrapped(batch)
        return loss

    def backward(self, loss: Tensor) -> float:
        self._square.zero_()
        self._wrapped.backward(loss)
        # Norm of the local gradients: an upper bound in kind, exact in what matters here, whether all are finite.
        square = sum(self.sum([float(self._square)]))
        return math.sqrt(square) / self.world_size if math.isfinite(square) else square

    def step(self, learning_rate: float) -> None:
        _set_rate(self._wrapped.optimizer, learning_rate)
        self._wrapped.step()

    def save(self, folder: Path) -> None:
        self._wrapped.save_checkpoint(str(folder), tag="engine", save_latest=False)

    def load(self, folder: Path) -> None:
        path, _ = self._wrapped.load_checkpoint(str(folder), tag="engine")
        if path is None:
            raise CheckpointError(f"DeepSpeed found no state in {folder}", mend="remove it and start again")


def skip_cpu_compile() -> None:
    """On the CPU accelerator, keep DeepSpeed from compiling its shared-memory op (minutes, and inference only).

    Touches DeepSpeed's private table of ops; a version without that table is left alone.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    import deepspeed.ops

    table = getattr(deepspeed.ops, "__compatible_ops__", None)
    if isinstance(table, dict) and "deepspeed_shm_comm" in table:
        table["deepspeed_shm_comm"] = False

"""An engine to swap drafters in, without vLLM: our swapper, routes, transport and worker calls are the real ones.

The twin keeps the calls of vLLM's engine that a swap makes, one worker, and a drafter of four tensors whose head is
computed from a packed copy. A test says which call fails, and when one returns.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from safetensors.torch import save_file
from samples import FINGERPRINT
from torch import Tensor, nn

from draftloop.pipeline import artifact
from draftloop.pipeline.errors import DraftloopError
from draftloop.pipeline.signature import FORMAT, canonical, key_id
from draftloop.serving_hooks.vllm import proof, versions, wake
from draftloop.serving_hooks.vllm.runtime import Runtime
from draftloop.serving_hooks.vllm.settings import ServingSettings, SwapSettings
from draftloop.serving_hooks.vllm.swap import Swapper

HIDDEN, TAPS, WORDS = 8, 24, 40
TOKEN = "a-token-of-24-characters"


class Packed(nn.Module):
    """A linear layer as on CPU: the plain weight is gone, the kernel has its own."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.input_size_per_partition = columns
        self.packed = torch.zeros(rows, columns)
        self.widths: list[int] = []  # rows of each input

    def cpu_linear(self, value: Tensor, weight: Tensor, bias: None) -> Tensor:
        self.widths.append(len(value))
        return value @ self.packed.T


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.fc = nn.Linear(TAPS, HIDDEN, bias=False)
        self.model.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.lm_head = Packed(WORDS, HIDDEN)
        self.draft_id_to_target_id = nn.Parameter(torch.zeros(WORDS, dtype=torch.int64), requires_grad=False)
        self.requires_grad_(False)

    def load_weights(self, weights: Any) -> None:
        for name, value in weights:
            self.place(name).copy_(value)

    def place(self, name: str) -> Tensor:
        """Where this tensor of a file lies."""
        return {
            "fc.weight": self.model.fc.weight,
            "norm.weight": self.model.norm.weight,
            "lm_head.weight": self.lm_head.packed,
            "d2t": self.draft_id_to_target_id,
        }[name]

    def forget(self) -> None:
        """As vLLM's deepest sleep."""
        for name in ("fc.weight", "norm.weight", "lm_head.weight", "d2t"):
            self.place(name).zero_()


class Engine:
    """As vLLM's AsyncLLM. `wake.install` changes the class: each site has its own."""

    def __init__(self, boot: Path, worker: Any) -> None:
        draft = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(boot)))
        self.vllm_config = SimpleNamespace(speculative_config=draft)
        self.worker = worker
        self.paused = False
        self.sleeping = 0
        self.calls: list[tuple[Any, ...]] = []
        self.faults: dict[str, list[Any]] = defaultdict(
            list
        )  # of the next calls: None goes well, else raised or answered
        self.gates: dict[str, asyncio.Event] = {}  # a call waits, once begun, until this is set

    async def _begin(self, name: str, *args: Any) -> Any:
        self.calls.append((name, *args))
        await asyncio.sleep(0)
        if name in self.gates:
            await self.gates[name].wait()
        fault = self.faults[name].pop(0) if self.faults[name] else None
        if isinstance(fault, BaseException):
            raise fault
        return fault

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        from draftloop.serving_hooks.vllm import worker

        answer = await self._begin(method, *args)
        return [answer] if answer is not None else [getattr(worker, method)(self.worker, *args)]

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        await self._begin("pause", mode)
        self.paused = True

    async def resume_generation(self) -> None:
        await self._begin("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        await self._begin("is_paused")
        return self.paused

    async def is_sleeping(self) -> bool:
        await self._begin("is_sleeping")
        return self.sleeping > 0

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self._begin("sleep", level)
        self.paused, self.sleeping = True, level
        if level > 1:
            self.worker.get_draft_model().forget()

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        await self._begin("wake_up", tags)
        if tags is None or "kv_cache" in tags:
            self.paused, self.sleeping = False, 0
        return not self.sleeping

    async def start_draft_weight_update(self) -> None:
        await self._begin("start")
        self.worker.weight_transfer_engine.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        await self._begin("update", request.slot)
        self.worker.weight_transfer_engine.receive_weights(request)

    async def finish_weight_update(self) -> None:
        await self._begin("finish")
        self.worker.weight_transfer_engine.finish_weight_update()


@dataclass
class Site:
    """Signed drafters boot, 2 and 3 in an agent's folder, and the engine that booted with the first."""

    folder: Path
    key: Ed25519PrivateKey
    runtime: Runtime
    engine: Engine
    drafter: Drafter
    digests: dict[str, str] = field(default_factory=dict)

    def start(self, unsupported: DraftloopError | None = None) -> Swapper:
        """As the admin plug-in meets the engine."""
        swapper = Swapper(self.engine, self.runtime)
        setattr(self.engine, wake.SWAPPER, swapper)
        swapper.start(unsupported)
        return swapper

    def place(self, version: str) -> Path:
        return self.folder / "agent" / "drafters" / version

    def serves(self, version: str) -> bool:
        """Whether the live drafter is this one, all of it."""
        return proof.differing(self.drafter, tensors(version)) == []

    def publish(self, version: str) -> None:
        values = tensors(version)
        manifest = {"family": "eagle3", "fingerprint": FINGERPRINT.to_dict()}
        manifest["tensor_digest"] = proof.tensor_digest(values)
        with artifact.staging(self.place(version)) as draft:
            save_file(values, draft / "model.safetensors")
            config = {"transformer_layer_config": {"vocab_size": FINGERPRINT.padded_vocab_size}}
            (draft / "config.json").write_text(json.dumps(config))
            artifact.publish(draft, self.place(version), manifest)
        self.digests[version] = (self.place(version) / artifact.MARKER).read_text()
        body: dict[str, Any] = dict.fromkeys(("snapshot_id", "champion_digest", "job_key", "override"), "x")
        body |= {"format": FORMAT, "digest": self.digests[version], "fingerprint": FINGERPRINT.digest, "time_ms": 1}
        body |= {"decision": "passed", "evidence": {"reasons": []}}
        value = base64.b64encode(self.key.sign(canonical(body))).decode()
        signature = {"algorithm": "Ed25519", "key_id": key_id(self.key.public_key()), "value": value}
        artifact.write_json(self.folder / "agent" / "verdicts" / f"{version}.json", body | {"signature": signature})


def tensors(version: str) -> dict[str, Tensor]:
    """Of this version, the same at each call."""
    generator = torch.Generator().manual_seed(sum(version.encode()))
    return {
        "fc.weight": torch.randn(HIDDEN, TAPS, generator=generator),
        "norm.weight": torch.randn(HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(WORDS, HIDDEN, generator=generator),
        "d2t": torch.full((WORDS,), len(version)),
    }


def make_site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Call it anew for each test: classes are changed by what is tried."""
    transport = _draft_disk(monkeypatch)
    drafter = Drafter()
    drafter.load_weights(tensors("boot").items())
    worker = SimpleNamespace(weight_transfer_engine=transport(drafter), get_draft_model=lambda: drafter)
    engine_class = type("OwnEngine", (Engine,), {})
    monkeypatch.setattr(versions, "async_llm", lambda: engine_class)
    wake.install()
    key = Ed25519PrivateKey.generate()
    public = folder / "gate.key.pub"
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    (folder / "token").write_text(TOKEN)
    settings = ServingSettings(
        target=folder / "unused",
        swap=SwapSettings(
            staging=folder / "agent" / "drafters",
            public_key=public,
            token_file=folder / "token",
            max_drafter_bytes=2**20,
        ),
    )
    runtime = Runtime(settings=settings, fingerprint=FINGERPRINT)
    engine = engine_class(folder / "agent" / "drafters" / "boot", worker)
    site = Site(folder, key, runtime, engine, drafter)
    for version in ("boot", "2", "3"):
        site.publish(version)
    return site


def _draft_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our transport, on a stand-in for the class of vLLM's that it derives from."""
    if "draftloop.serving_hooks.vllm.transport" not in sys.modules:
        for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        base = ModuleType("vllm.distributed.weight_transfer.base")
        base.WeightTransferEngine = type("WeightTransferEngine", (), {"__init__": _hold})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, base.__name__, base)
    from draftloop.serving_hooks.vllm.transport import DraftDisk, FromSlot

    nothing = SimpleNamespace(
        initialize_layerwise_reload=lambda model: None,
        finalize_layerwise_reload=lambda model, config: None,
        get_layerwise_info=lambda module: SimpleNamespace(can_load=lambda: False),
    )
    monkeypatch.setattr(versions, "layerwise", lambda: nothing)
    monkeypatch.setattr(versions, "update_request", lambda info: FromSlot(**info))
    monkeypatch.setattr(versions, "end_session", lambda worker: None)
    monkeypatch.setattr(versions, "release", lambda: "0.32.0")
    return DraftDisk


def _hold(self: Any, model: nn.Module) -> None:
    self.model, self.model_config = model, None

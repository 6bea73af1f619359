"""Drafter folders that are almost right, staged with a verdict that lets them in: what a swap must see through."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from live_site import TinySite
from safetensors.torch import load_file, save_file

from draftloop.pipeline import artifact
from draftloop.pipeline.signature import canonical, key_id
from draftloop.serving_hooks.vllm.proof import tensor_digest

Tensors = dict[str, torch.Tensor]


class Draft:
    """A drafter folder being changed before it is sealed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: Tensors = load_file(folder / "model.safetensors")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.manifest: dict[str, Any] = json.loads((folder / artifact.MANIFEST).read_text())

    def write(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        (self.folder / "config.json").write_text(json.dumps(self.config))


def restage(
    site: TinySite,
    version: str,
    change: Callable[[Draft], None] = lambda draft: None,
    after: Callable[[Path], None] = lambda folder: None,
    *,
    of: str = "2",
) -> Path:
    """A changed copy of a version, sealed and signed as if it were right. after: changes the folder before sealing."""
    final = site.place(version)
    shutil.rmtree(final, ignore_errors=True)
    with artifact.staging(final) as folder:
        for name in ("model.safetensors", "config.json", artifact.MANIFEST):
            shutil.copyfile(site.place(of) / name, folder / name)
        draft = Draft(folder)
        change(draft)
        (folder / artifact.MANIFEST).unlink()
        draft.write()
        after(folder)
        artifact.publish(folder, final, draft.manifest)
    artifact.write_json(site.verdict_file(version), resign(site, site.verdict_file(of), digest=site.digest(version)))
    return final


def shake(draft: Draft) -> None:
    """Another value in every tensor: nothing of the drafter before may be left after a swap."""
    generator = torch.Generator().manual_seed(4)
    for value in draft.tensors.values():
        if value.is_floating_point():
            value += 0.05 * torch.randn(value.shape, generator=generator).to(value.dtype)
    positions = torch.arange(len(draft.tensors["d2t"]))
    draft.tensors["d2t"] = (draft.tensors["d2t"] + positions).flip(0) - positions
    draft.manifest["tensor_digest"] = tensor_digest(draft.tensors)


def resign(site: TinySite, verdict: Path, *, key: Ed25519PrivateKey | None = None, **fields: Any) -> dict[str, Any]:
    """A verdict with other fields, signed again; key: None for the trusted one."""
    body = {**json.loads(verdict.read_text()), **fields}
    body.pop("signature")
    signer = key or site.key
    return {
        **body,
        "signature": {
            "algorithm": "Ed25519",
            "key_id": key_id(signer.public_key()),
            "value": base64.b64encode(signer.sign(canonical(body))).decode(),
        },
    }

"""An engine whose workers fail on order: what no drafter that passed every check makes them do.

A general plug-in of its own, beside ours, stands before the one call that loads weights; a file says what goes wrong.
"""

from __future__ import annotations

from pathlib import Path

_PLUGIN = """
import os
from pathlib import Path

def register():
    from draftloop.serving_hooks.vllm.transport import Copy, DraftDisk

    load = DraftDisk.receive_weights

    def receive(self, info):
        orders = Path(os.environ["FAULT_ORDERS"]).read_text().split()
        held = self.copies[info.slot]
        tensors = dict(held.tensors)
        if f"shape:{info.slot}" in orders:  # vLLM fails on it half way
            tensors["layers.0.mlp.down_proj.weight"] = tensors["layers.0.mlp.down_proj.weight"][:, :-1]
        if f"lost:{info.slot}" in orders:  # vLLM says nothing about it
            del tensors["lm_head.weight"]
        if f"column:{info.slot}" in orders:  # one that no sample looks at
            tensors["fc.weight"] = tensors["fc.weight"].clone()
            tensors["fc.weight"][:, 1] += 1
        self.copies[info.slot] = Copy(held.digest, tensors)
        try:
            load(self, info)
        finally:
            self.copies[info.slot] = held

    end = DraftDisk.finish_weight_update

    def finish(self):
        orders = Path(os.environ["FAULT_ORDERS"])
        if "finish" in orders.read_text().split():  # once
            orders.write_text("")
            raise RuntimeError("told to fail at the finish")
        end(self)

    DraftDisk.receive_weights, DraftDisk.finish_weight_update = receive, finish
"""


def faulty_python(folder: Path, python: Path) -> tuple[Path, Path]:
    """A Python that starts vLLM with the faults plug-in and vLLM's own development routes; and the file of orders."""
    distribution = folder / "faults-1.0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text("[vllm.general_plugins]\nfaults = engine_faults_plugin:register\n")
    (folder / "engine_faults_plugin.py").write_text(_PLUGIN)
    orders = folder / "orders"
    orders.write_text("")
    started = folder / "python"
    started.write_text(
        "#!/bin/sh\n"
        f"export PYTHONPATH={folder} FAULT_ORDERS={orders} VLLM_PLUGINS=draftloop,faults VLLM_SERVER_DEV_MODE=1\n"
        f'exec {python} "$@"\n'
    )
    started.chmod(0o755)
    return started, orders

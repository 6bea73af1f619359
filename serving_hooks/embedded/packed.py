"""Linear layers over weights laid out once for small batches of rows.

A bf16 product on the CPU otherwise reorders its weight matrix at every call, which at decoding's few rows costs more
than the product. oneDNN offers the reordering on its own (the operators that compiled graphs use); where they are not
there, or for another dtype or device, the module is called as it is. Costs the weights' memory once more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS_HINT = 32  # the layout serves any number of rows; it is chosen for this one


class PackedLinears:
    """Calls linear modules through packed copies of their weights; the modules themselves are never changed."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and _available()
        self._weights: dict[nn.Module, Tensor] = {}

    @property
    def num_packed(self) -> int:
        return len(self._weights)

    def add(self, module: nn.Module) -> None:
        """Pack one linear module where that can be done."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        if self._enabled and weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
            with torch.no_grad():
                self._weights[module] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        packed = self._weights.get(module)
        if packed is None:
            plain: Tensor = module(x)
            return plain
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, module.bias, "none", [], None)
        return product


class _Packed(nn.Module):
    """Stands in for one linear module of a model that is the engine's own."""

    def __init__(self, linears: PackedLinears, module: nn.Linear) -> None:
        super().__init__()
        self.weight = module.weight
        self._call = linears
        self._linear = module

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self._linear, x)


def pack_in_place(model: nn.Module) -> None:
    """Route every linear module of a model that nobody else holds through packed weights; names change with it."""
    linears = PackedLinears(enabled=True)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                linears.add(child)
                setattr(parent, name, _Packed(linears, child))


def _available() -> bool:
    """Builds without oneDNN, and versions that renamed its operators, call the modules."""
    return all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))

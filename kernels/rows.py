"""Row-wise pieces of a decoder layer with hand-written gradients: fewer passes over memory than autograd's own.

Inputs may be bf16; sums and products are fp32 inside and rounded once on the way out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_normalize_reference(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2I] = [gate, up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half rotary embedding of x [R, heads, D] by cos, sin [R, D] (both halves equal)."""
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return (x.float() * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(x.dtype)


class _RmsNormalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.pow_(2).div_(x.shape[-1]).add_(eps).rsqrt_()
        out = torch.mul(x, scale, out=torch.empty_like(x))
        ctx.save_for_backward(out, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        out, scale = ctx.saved_tensors
        grad = grad_outputs[0]
        mean = (grad * out).sum(-1, keepdim=True, dtype=torch.float32).div_(out.shape[-1])
        inner = (out * mean).neg_().add_(grad)
        return torch.mul(inner, scale, out=torch.empty_like(out)), None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = grad_outputs[0]
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return (out,)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        cos, sin = cos[:, None, :half].to(x.dtype), sin[:, None, :half].to(x.dtype)
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad_outputs[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_left, out_right = out.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin)
    return out


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """As the reference; the caller multiplies by the norm's weight or folds it into the next product."""
    out: Tensor = _RmsNormalize.apply(x, eps)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """As the reference, keeping only its input for the gradient."""
    out: Tensor = _SwiGlu.apply(gate_up)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As the reference, in x's dtype; its gradient is the rotation back. cos and sin get no gradient."""
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out

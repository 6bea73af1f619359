"""Soft-target cross-entropy of a draft head against a teacher head, without ever holding all logits.

The student's rows of all unrolled steps are stacked and meet each chunk of teacher rows once: teacher logits once per
chunk for all steps, and the gradient is computed in the forward pass (chunk by chunk, in fp32 from the logits of both
sides), so a chunk's buffers are all that lives. Shapes: T steps, R teacher rows, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 128


def soft_target_loss_reference(
    student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, weight: Tensor
) -> Tensor:
    """The plain form: sum over steps and rows of weight * CE(softmax(teacher logits), student logits).

    student [T, R, H]; head [D, H]; teacher [R, H]; teacher_head [D, H]; weight [T, R] fp32. Scalar fp32.
    """
    target = (teacher @ teacher_head.T).float().softmax(-1)
    log_probs = (student @ head.T).float().log_softmax(-1)
    return -((target * log_probs).sum(-1) * weight).sum()


class _SoftTargetLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, weight: Tensor
    ) -> Tensor:
        steps, rows, hidden = student.shape
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        need_student, need_head = ctx.needs_input_grad[:2]
        grad_student = torch.empty_like(student) if need_student else None
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if need_head else None
        for start in range(0, rows, CHUNK_ROWS):
            part = slice(start, min(start + CHUNK_ROWS, rows))
            size = part.stop - start
            target = (teacher[part] @ teacher_head.T).float().softmax(-1)  # [C, D]
            x = student[:, part].reshape(steps * size, hidden)
            logits = (x @ head.T).float().view(steps, size, -1)
            w = weight[:, part]
            lse = logits.logsumexp(-1)
            total += ((lse - torch.einsum("tcd,cd->tc", logits, target)) * w).sum()
            if not (need_student or need_head):
                continue
            # p_student - p_teacher, both from logits and subtracted in fp32: in bf16 the difference would be noise
            grad = logits.sub_(lse.unsqueeze(-1)).exp_().sub_(target).mul_(w.unsqueeze(-1))
            grad = grad.view(steps * size, -1).to(student.dtype)
            if grad_student is not None:
                grad_student[:, part] = (grad @ head).view(steps, size, hidden)
            if grad_head is not None:
                grad_head += (grad.T @ x).float()
        ctx.save_for_backward(grad_student, grad_head)
        ctx.head_dtype = head.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_student, grad_head = ctx.saved_tensors
        scale = grad_outputs[0]
        return (
            None if grad_student is None else grad_student * scale.to(grad_student.dtype),
            None if grad_head is None else (grad_head * scale).to(ctx.head_dtype),
            None,
            None,
            None,
        )


def soft_target_loss(student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, weight: Tensor) -> Tensor:
    """The same sum in chunks with the gradient computed in the forward pass; shapes as the reference.

    All four matrices share one dtype; the loss and both distributions are fp32.
    """
    loss: Tensor = _SoftTargetLoss.apply(student, head, teacher, teacher_head, weight)
    return loss

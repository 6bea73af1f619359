"""What EAGLE-3 training minimises, as a module whose forward any wrapper (DDP, DeepSpeed) can call.

Soft targets: the target's distribution restricted to the draft vocabulary and renormalised; depth t weighs decay^t;
positions whose first choice the drafter cannot propose are left out of the loss (they still count in tau).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftloop.kernels.soft_target import soft_target_loss, soft_target_loss_reference
from draftloop.trainers.batches import Batch
from draftloop.trainers.eagle3 import Eagle3
from draftloop.trainers.unroll import unroll_rows


class Objective(nn.Module):
    """Weighted sum of soft-target cross-entropies of a batch; the caller divides by the global sum of weights."""

    def __init__(
        self, model: Eagle3, embedding: Tensor, teacher_head: Tensor, *, steps: int, dtype: torch.dtype
    ) -> None:
        """embedding [V, H] and teacher_head [D, H] belong to the frozen target; dtype: of the matrix products."""
        super().__init__()
        self.model = model
        self.steps = steps
        self.dtype = dtype
        # In a tuple: neither parameters nor buffers, so no wrapper copies, casts or sends them.
        self._frozen = (embedding, teacher_head.to(dtype).contiguous())

    def forward(self, batch: Batch) -> Tensor:
        """Sum over supervised (depth, anchor) of weight * CE, fp32 scalar; an exact 0 if there are none."""
        kept = batch.weight.sum(0).nonzero().squeeze(-1) if not batch.is_empty else batch.anchors
        if not len(kept):
            touched = [parameter.sum() * 0.0 for parameter in self.model.parameters() if parameter.requires_grad]
            return torch.stack([value.float() for value in touched]).sum()
        outputs = self.outputs(batch)
        # Teacher row r supervises anchor r-t at depth t; clamped rows have weight 0.
        depth = torch.arange(self.steps, device=kept.device).unsqueeze(1)
        rows = (kept - depth).clamp_(min=0) + depth * outputs.shape[1]  # [T, R']
        student = self.model.norm(outputs.flatten(0, 1).index_select(0, rows.flatten())).to(self.dtype)
        return soft_target_loss(
            student.view(self.steps, len(kept), -1),
            self.model.lm_head.weight.to(self.dtype),
            batch.teacher.index_select(0, kept).to(self.dtype),
            self._frozen[1],
            batch.weight.index_select(1, kept).float(),
        )

    def outputs(self, batch: Batch) -> Tensor:
        """Outputs of all depths [T, R, H]."""
        return unroll_rows(self.model, self._frozen[0], batch, steps=self.steps, dtype=self.dtype)

    def reference(self, batch: Batch) -> Tensor:
        """The same sum with all logits at once and autograd's own gradient."""
        outputs = self.outputs(batch)
        rows = torch.arange(outputs.shape[1], device=outputs.device)
        student = torch.stack([outputs[t, (rows - t).clamp(min=0)] for t in range(self.steps)])
        student = self.model.norm(student).to(self.dtype)
        head = self.model.lm_head.weight.to(self.dtype)
        return soft_target_loss_reference(student, head, batch.teacher.to(self.dtype), self._frozen[1], batch.weight)

    @torch.no_grad()
    def drafts(self, batch: Batch) -> Tensor:
        """Greedy proposals of every anchor at every depth, target ids int64 [T, R]."""
        outputs = self.model.norm(self.outputs(batch)).to(self.dtype).flatten(0, 1)
        head = self.model.lm_head.weight.to(self.dtype)
        best = torch.cat([(rows @ head.T).argmax(-1) for rows in outputs.split(512)])
        return self.model.to_target_ids(best).view(self.steps, -1)

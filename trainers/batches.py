"""From snapshot rows to training batches: one document per row, packed without padding.

A document of n tokens, prompt P: row i (0 <= i <= n-3) holds the features of token i and the embedding of token i+1.
Its anchors, the rows that propose, are those whose first proposal i+2 is an output token: i from max(P-2, 0) to n-3.
Anchor r of a document at depth t proposes token first+2+r+t, taught by the target's distribution at position
first+1+r+t: that is the document's teacher row r+t, where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class TokenRow(Protocol):
    """What training needs of a snapshot row."""

    @property
    def record_id(self) -> str: ...
    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def output_ids(self) -> list[int]: ...
    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class Document:
    """Token ids of one row and where its anchors begin."""

    record_id: str
    token_ids: Tensor  # int64 [n]
    prompt_length: int
    greedy: bool  # sampled at temperature 0: each output token is the target's first choice

    @property
    def num_positions(self) -> int:
        """Rows at depth 0: every token that has a next and an after-next."""
        return len(self.token_ids) - 2

    @property
    def first(self) -> int:
        """The first anchor."""
        return max(self.prompt_length - 2, 0)

    @property
    def num_anchors(self) -> int:
        """Rows that propose output tokens."""
        return self.num_positions - self.first


def documents_of(rows: Sequence[TokenRow]) -> list[Document]:
    """The rows that have something to learn: at least one output token that follows two others."""
    documents = [
        Document(
            row.record_id,
            torch.tensor([*row.prompt_ids, *row.output_ids], dtype=torch.int64),
            len(row.prompt_ids),
            row.temperature == 0,
        )
        for row in rows
        if row.output_ids
    ]
    return [document for document in documents if document.num_anchors > 0]


class DocumentFeatures(NamedTuple):
    """The frozen target's view of one document, computed once per run."""

    taps: Tensor  # [num_positions, N, H]
    teacher: Tensor  # [num_anchors, H] last hidden state of the teacher rows (token positions first+1 ... n-2)
    choice: Tensor  # int64 [num_anchors] the target's first choice there


class Batch(NamedTuple):
    """Packed documents. S positions and R anchors of all documents, one document after another."""

    taps: Tensor  # [S, N, H]
    next_ids: Tensor  # int64 [S] token i+1
    positions: Tensor  # int64 [S] i
    anchors: Tensor  # int64 [R] rows of S
    anchor_positions: Tensor  # int64 [R]
    deeper_ids: Tensor  # int64 [steps - 1, R] token i+1+t for t = 1..; 0 past the end
    teacher: Tensor  # [R, H]
    weight: Tensor  # fp32 [steps, R] decay^t where teacher row r supervises anchor r-t at depth t, else 0
    lengths: list[int]  # positions of each document
    rows: list[int]  # anchors of each document
    record_ids: list[str]

    @property
    def is_empty(self) -> bool:
        """Nothing here for this rank."""
        return not self.rows


def supervision(count: int, choice_kept: Tensor, steps: int, decay: float) -> Tensor:
    """Weights [steps, count]: decay^t where anchor r-t exists and the teacher's choice can be proposed."""
    teacher_row = torch.arange(count, device=choice_kept.device)
    depth = torch.arange(steps, device=choice_kept.device).unsqueeze(1)
    return ((teacher_row >= depth) & choice_kept) * (decay ** depth.float())


def collate(
    documents: Sequence[Document],
    features: Sequence[DocumentFeatures],
    t2d: Tensor,
    *,
    steps: int,
    decay: float,
    device: torch.device,
) -> Batch:
    """Pack documents for one forward. t2d: bool [V], on the CPU."""
    if not documents:
        none = torch.empty(0, dtype=torch.int64, device=device)
        nothing = torch.empty(0, device=device)
        return Batch(nothing, none, none, none, none, none, nothing, nothing, [], [], [])
    lengths = [document.num_positions for document in documents]
    rows = [document.num_anchors for document in documents]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    anchors = [torch.arange(document.first, document.num_positions) for document in documents]
    deeper: list[Tensor] = []
    for document in documents:
        padded = torch.cat([document.token_ids, document.token_ids.new_zeros(steps)])
        windows = padded[document.first + 1 :].unfold(0, steps, 1)[: document.num_anchors]  # [r, t] = token i+1+t
        deeper.append(windows[:, 1:].T)
    return Batch(
        taps=torch.cat([feature.taps for feature in features]).to(device),
        next_ids=torch.cat([document.token_ids[1:-1] for document in documents]).to(device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        anchors=torch.cat([local + start for local, start in zip(anchors, starts, strict=True)]).to(device),
        anchor_positions=torch.cat(anchors).to(device),
        deeper_ids=torch.cat(deeper, dim=1).to(device),
        teacher=torch.cat([feature.teacher for feature in features]).to(device),
        weight=torch.cat(
            [
                supervision(count, t2d[feature.choice], steps, decay)
                for count, feature in zip(rows, features, strict=True)
            ],
            dim=1,
        ).to(device),
        lengths=lengths,
        rows=rows,
        record_ids=[document.record_id for document in documents],
    )

"""Features of the frozen target, computed once per run and kept in a mapped file until the run ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftloop.trainers.batches import Document, DocumentFeatures
from draftloop.trainers.target import DTYPES, Target


class FeatureStore:
    """Taps, last hidden states and first choices of documents; a flat file, read through the page cache."""

    def __init__(self, path: Path, documents: Sequence[Document], target: Target, dtype: str) -> None:
        """Reserve the file. dtype: what the features are kept in, "bfloat16" or "float32"."""
        self._path = path
        self._documents = documents
        taps, hidden = len(target.fingerprint.tap_layers), target.fingerprint.hidden_size
        num_positions = sum(document.num_positions for document in documents)
        num_anchors = sum(document.num_anchors for document in documents)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a run that was killed may have left one
        size = (num_positions * taps + num_anchors) * hidden
        flat = torch.from_file(str(path), shared=True, size=max(size, 1), dtype=DTYPES[dtype])
        split = num_positions * taps * hidden
        self._taps = flat[:split].view(num_positions, taps, hidden)
        self._teacher = flat[split:size].view(num_anchors, hidden)
        self._choice = torch.zeros(num_anchors, dtype=torch.int64)
        self._tap_starts = _starts([document.num_positions for document in documents])
        self._anchor_starts = _starts([document.num_anchors for document in documents])

    def fill(self, target: Target, *, batch_tokens: int, on_batch: Callable[[int], None] | None = None) -> None:
        """Run the target over every document, longest first, in right-padded batches of at most batch_tokens."""
        order = sorted(range(len(self._documents)), key=lambda index: -len(self._documents[index].token_ids))
        while order:
            width = len(self._documents[order[0]].token_ids)
            count = max(1, batch_tokens // width)
            chosen, order = order[:count], order[count:]
            self._fill_batch(target, chosen, width)
            if on_batch is not None:
                on_batch(len(chosen))

    def _fill_batch(self, target: Target, chosen: Sequence[int], width: int) -> None:
        device = target.embedding.device
        ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        for row, index in enumerate(chosen):
            tokens = self._documents[index].token_ids
            ids[row, : len(tokens)] = tokens
        # No mask: padding is on the right and attention is causal, so no token of a document ever sees it.
        taps, last = target.features(ids.to(device))
        for row, index in enumerate(chosen):
            document, (own_taps, own_teacher, own_choice) = self._documents[index], self[index]
            own_taps.copy_(taps[row, : document.num_positions])
            teacher = last[row, document.first + 1 : len(document.token_ids) - 1]
            own_teacher.copy_(teacher)
            own_choice.copy_(
                document.token_ids[document.first + 2 :] if document.greedy else first_choice(teacher, target.head)
            )

    def __getitem__(self, index: int) -> DocumentFeatures:
        """Views of one document's features."""
        document = self._documents[index]
        start, anchor = self._tap_starts[index], self._anchor_starts[index]
        stop = anchor + document.num_anchors
        return DocumentFeatures(
            self._taps[start : start + document.num_positions], self._teacher[anchor:stop], self._choice[anchor:stop]
        )

    def __len__(self) -> int:
        return len(self._documents)

    def remove(self) -> None:
        """Delete the file; open views stay readable until dropped."""
        self._path.unlink(missing_ok=True)


def first_choice(last: Tensor, head: Tensor, *, chunk: int = 256) -> Tensor:
    """The target's most likely token for each row of last hidden states [R, H], int64 [R]."""
    if not len(last):
        return torch.empty(0, dtype=torch.int64, device=last.device)
    return torch.cat([(rows.to(head.dtype) @ head.T).argmax(-1) for rows in last.split(chunk)])


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts

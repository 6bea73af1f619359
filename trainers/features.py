"""Features of the frozen target, computed once per run and kept in a mapped file until the run ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftloop.pipeline.errors import StorageError
from draftloop.trainers.batches import Document, DocumentFeatures
from draftloop.trainers.target import DTYPES, Target

MIN_PREFIX = 8  # shorter common beginnings are not worth a second kind of forward


def _reserve(path: Path, num_bytes: int) -> None:
    """Claim the file's blocks. A sparse file would end the process with SIGBUS once the disk is full."""
    try:
        with path.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(
            f"no room for {num_bytes / 1e6:.0f} MB of target features at {path}: {error.strerror}",
            mend="free disk space, or put the work folder on a larger disk; the same command then goes on",
        ) from error


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
        _reserve(path, max(size, 1) * DTYPES[dtype].itemsize)
        flat = torch.from_file(str(path), shared=True, size=max(size, 1), dtype=DTYPES[dtype])
        split = num_positions * taps * hidden
        self._taps = flat[:split].view(num_positions, taps, hidden)
        self._teacher = flat[split:size].view(num_anchors, hidden)
        self._choice = torch.zeros(num_anchors, dtype=torch.int64)
        self._tap_starts = _starts([document.num_positions for document in documents])
        self._anchor_starts = _starts([document.num_anchors for document in documents])

    def fill(self, target: Target, *, batch_tokens: int) -> None:
        """Run the target over every document, longest first, in right-padded batches of at most batch_tokens.

        What all documents begin with (a system prompt) is run once.
        """
        device = target.embedding.device
        shared = common_prefix([document.token_ids for document in self._documents])
        prefix = target.prefix(self._documents[0].token_ids[:shared].to(device)) if shared >= MIN_PREFIX else None
        skip = shared if prefix is not None else 0
        order = sorted(range(len(self._documents)), key=lambda index: -len(self._documents[index].token_ids))
        while order:
            width = len(self._documents[order[0]].token_ids) - skip
            count = max(1, batch_tokens // width)
            chosen, order = order[:count], order[count:]
            ids = torch.zeros(len(chosen), width, dtype=torch.int64)
            for row, index in enumerate(chosen):
                tokens = self._documents[index].token_ids[skip:]
                ids[row, : len(tokens)] = tokens
            # No mask: padding is on the right and attention is causal, so no token of a document ever sees it.
            ids = ids.to(device)
            found = target.features_after(prefix, ids) if prefix is not None else target.features(ids)
            for row, index in enumerate(chosen):
                taps, last = (part[row] for part in found)
                if prefix is not None:
                    taps, last = (torch.cat([a[0], b]) for a, b in zip(prefix.features, (taps, last), strict=True))
                self._keep(index, taps, last, target.head)

    def _keep(self, index: int, taps: Tensor, last: Tensor, head: Tensor) -> None:
        """Store what training reads of one document's features [T', ...], T' at least its length."""
        document, (own_taps, own_teacher, own_choice) = self._documents[index], self[index]
        own_taps.copy_(taps[: document.num_positions])
        teacher = last[document.first + 1 : len(document.token_ids) - 1]
        own_teacher.copy_(teacher)
        own_choice.copy_(document.token_ids[document.first + 2 :] if document.greedy else first_choice(teacher, head))

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


def common_prefix(sequences: Sequence[Tensor]) -> int:
    """How many tokens all sequences begin with, less one so that something follows; 0 for fewer than two sequences."""
    if len(sequences) < 2:
        return 0
    width = min(len(sequence) for sequence in sequences) - 1
    heads = torch.stack([sequence[:width] for sequence in sequences])
    return int((heads == heads[0]).all(0).long().cumprod(0).sum())


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

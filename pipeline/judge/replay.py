"""Exact tau from logged text: every drafter walks the same held-out outputs as serving would have.

Greedy drafts only: a draft was accepted exactly if it equals the logged token. That is exact for greedy requests and
unbiased for sampled ones, because given the emitted token a one-hot draft was accepted iff it is that token
(arXiv 2211.17192; the walk and the programme for drafters that sample are in kernels/walk.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftloop.kernels.ngram import propose_ngram
from draftloop.kernels.walk import NO_DRAFT, greedy_walk, match_lengths
from draftloop.pipeline.data.snapshot import Row
from draftloop.pipeline.errors import InputError
from draftloop.pipeline.fingerprint import Fingerprint, require_same
from draftloop.pipeline.judge.report import ReplayReport, RequestReplay
from draftloop.trainers.checkpoint import Drafter
from draftloop.trainers.target import Target
from draftloop.trainers.unroll import propose

__all__ = ["Candidate", "ReplayProgress", "ReplayReport", "RequestReplay", "replay"]

Candidate = Drafter | str | None  # None: no drafter, tau is 1; the only string is "ngram"


class ReplayProgress(NamedTuple):
    """How far a replay is."""

    num_requests: int
    total_requests: int
    num_tokens: int  # prompt and output tokens read
    total_tokens: int


def replay(
    target: Target,
    drafters: Mapping[str, Candidate],
    rows: Sequence[Row],
    *,
    k: int,
    snapshot_id: str,
    batch_tokens: int = 4096,
    on_progress: Callable[[ReplayProgress], None] | None = None,
) -> dict[str, ReplayReport]:
    """Replay each drafter on the same rows; the target's features are computed once a batch for all of them.

    k: drafts a step. batch_tokens: padded positions a forward; a longer row goes alone. Reports keep the rows' order.
    Raises FingerprintMismatchError (a drafter of another target), InputError (k, a row without prompt or output).
    """
    _check(target, drafters, rows, k)
    learned = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, Drafter)}
    walks: dict[str, list[RequestReplay | None]] = {name: [None] * len(rows) for name in drafters}
    seen_requests = seen_tokens = 0
    total_tokens = sum(len(row.prompt_ids) + len(row.output_ids) for row in rows)
    for indices in _batches(rows, batch_tokens):
        batch = [rows[index] for index in indices]
        drafts = _learned_drafts(target, learned, batch, k)
        for name, drafter in drafters.items():
            for index, walked in zip(indices, _walk(drafter, batch, drafts.get(name), k), strict=True):
                walks[name][index] = walked
        seen_requests += len(batch)
        seen_tokens += sum(len(row.prompt_ids) + len(row.output_ids) for row in batch)
        if on_progress is not None:
            on_progress(ReplayProgress(seen_requests, len(rows), seen_tokens, total_tokens))
    return {
        name: ReplayReport(
            drafter=name,
            snapshot_id=snapshot_id,
            k=k,
            requests=tuple(walked for walked in walks[name] if walked is not None),
            target=target.fingerprint.digest,
            drafter_digest=drafter.digest if isinstance(drafter, Drafter) else None,
        )
        for name, drafter in drafters.items()
    }


def _check(target: Target, drafters: Mapping[str, Candidate], rows: Sequence[Row], k: int) -> None:
    if k < 1:
        raise InputError(f"k={k}: a replay needs at least one draft a step", mend="set num_speculative_tokens >= 1")
    for name, drafter in drafters.items():
        if isinstance(drafter, Drafter):
            own = Fingerprint.from_dict(drafter.manifest.fingerprint)
            require_same(target.fingerprint, own, expected_of="target", found_of=f"drafter {name!r}")
        elif drafter is not None and drafter != "ngram":
            raise InputError(f"drafter {name!r} is {drafter!r}", mend='give a Drafter, None or "ngram"')
    for row in rows:
        if not row.prompt_ids or not row.output_ids:
            raise InputError(
                f"record {row.record_id} has {len(row.prompt_ids)} prompt and {len(row.output_ids)} output tokens",
                mend="curate rejects such records: replay a published snapshot",
            )


def _batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[int]]:
    """Row indices, sorted by length so that little is padding, in batches of at most batch_tokens padded positions."""
    lengths = [len(row.prompt_ids) + len(row.output_ids) for row in rows]
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: -lengths[index]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:  # the first is the longest
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.inference_mode()
def _learned_drafts(target: Target, drafters: Mapping[str, Drafter], batch: Sequence[Row], k: int) -> dict[str, Tensor]:
    """Drafts of every drafter at every row of the padded batch, int64 [B, T, K] on the CPU."""
    if not drafters:
        return {}
    device = target.embedding.device
    sequences = [[*row.prompt_ids, *row.output_ids] for row in batch]
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    width = int(lengths.max())
    input_ids = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences], device=device)
    # Padding is on the right and attention causal: no mask is needed, and without one sdpa takes its fast path.
    taps = target.features(input_ids).taps
    return {
        name: propose(drafter.model, target.embedding, taps, input_ids, lengths, k=k).cpu()
        for name, drafter in drafters.items()
    }


def _walk(drafter: Candidate, batch: Sequence[Row], drafts: Tensor | None, k: int) -> list[RequestReplay]:
    """Walk each row's output after its first token, which prefill emitted."""
    if drafter == "ngram":
        return [_request(row, *_ngram_walk(row, k)) for row in batch]
    counts = [len(row.output_ids) - 1 for row in batch]
    if drafts is None:
        return [_request(row, count, [0] * k) for row, count in zip(batch, counts, strict=True)]
    assert isinstance(drafter, Drafter)
    limit = drafter.model.config.max_position_embeddings
    width = max(1, *counts)
    anchored = torch.full((len(batch), width, k), NO_DRAFT)
    tokens = torch.zeros(len(batch), width, dtype=torch.int64)
    for index, (row, count) in enumerate(zip(batch, counts, strict=True)):
        first = len(row.prompt_ids) - 1  # the prompt's last row drafts what follows prefill's token
        anchored[index, :count] = drafts[index, first : first + count]
        depth_positions = torch.arange(first, first + count)[:, None] + torch.arange(k)
        anchored[index, :count][depth_positions >= limit] = NO_DRAFT  # engines stop drafting at the drafter's limit
        tokens[index, :count] = torch.tensor(row.output_ids[1:], dtype=torch.int64)
    lengths = torch.tensor(counts)
    walked = greedy_walk(match_lengths(anchored, tokens, lengths), lengths, k=k)
    steps, at_least = walked.num_steps.tolist(), walked.at_least.tolist()
    return [_request(row, steps[index], at_least[index]) for index, row in enumerate(batch)]


def _ngram_walk(row: Row, k: int) -> tuple[int, list[int]]:
    """The engine's n-gram floor: looked up at visited anchors only, since its cost grows with the text."""
    ids = [*row.prompt_ids, *row.output_ids]
    steps, at_least = 0, [0] * k
    known = len(row.prompt_ids) + 1  # ids[:known] are there when the step starts
    while known < len(ids):
        steps += 1
        proposed = propose_ngram(ids[:known], k=k)
        accepted = 0
        while accepted < min(len(proposed), len(ids) - known) and proposed[accepted] == ids[known + accepted]:
            at_least[accepted] += 1
            accepted += 1
        known += accepted + 1
    return steps, at_least


def _request(row: Row, num_steps: int, at_least: Sequence[int]) -> RequestReplay:
    return RequestReplay(
        record_id=row.record_id,
        conversation_id=row.conversation_id,
        slices=dict(row.slices),
        num_tokens=len(row.output_ids) - 1,
        num_steps=num_steps,
        accepted_at_least=tuple(at_least),
    )

"""One step after the other over a batch whose members come and go. Knows no threads; the engine owns the clock.

Active requests always occupy the first slots, in the order of `active`: a finished one is replaced by the last one, so
every forward reads the caches as plain views.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from draftloop.kernels.ngram import propose_ngram
from draftloop.pipeline.records import SpecCounters
from draftloop.serving_hooks.embedded.eagle_runner import EagleRunner
from draftloop.serving_hooks.embedded.packed import pack_in_place
from draftloop.serving_hooks.embedded.running import Running
from draftloop.serving_hooks.embedded.sampler import choose
from draftloop.serving_hooks.embedded.target_runner import TargetRunner
from draftloop.serving_hooks.embedded.types import EngineConfig
from draftloop.trainers.eagle3 import Eagle3
from draftloop.trainers.target import Target


class BatchCore:
    """Admission, prefill, drafting, verification, retirement."""

    def __init__(self, target: Target, config: EngineConfig, on_finish: Callable[[Running], None]) -> None:
        self.config = config
        self.waiting: deque[Running] = deque()
        self.active: list[Running] = []
        self.counters = SpecCounters()
        self.drafter: EagleRunner | None = None
        self.drafter_version: str | None = None
        self._on_finish = on_finish
        self._stop_ids = target.eos_ids
        # A step's rows are padded to one width, so a short request may write past its own end.
        self._num_rows = config.max_sequence + config.num_speculative_tokens + 2
        self._target = TargetRunner(target, config.max_batch, self._num_rows, pack_weights=config.pack_weights)
        taps = (len(target.fingerprint.tap_layers), target.fingerprint.hidden_size)
        # Features of every processed token stay, so that a drafter can be loaded while requests run. Zeros, not fresh
        # memory: padding rows are computed too, and a NaN there would reach the drafter's cache.
        self.taps = torch.zeros(
            (config.max_batch, self._num_rows, *taps), dtype=self._target.dtype, device=self._target.device
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._target.dtype

    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    def make_runner(self, model: Eagle3) -> EagleRunner:
        """A runner for another drafter, its cache rebuilt for all running requests. Changes nothing that serves.

        The model becomes the runner's own: its linear modules may be replaced.
        """
        if self.config.pack_weights:
            pack_in_place(model)
        runner = EagleRunner(model, self._target.target.embedding, self.config.max_batch, self._num_rows)
        with torch.inference_mode():
            for slot, state in enumerate(self.active):
                runner.catch_up(slot, state, self.taps)
        return runner

    def step(self) -> None:
        """Admit what fits, then one target step for all active requests."""
        with torch.inference_mode():
            self._drop_cancelled()
            self._admit()
            if self.active:
                self._decode()

    def abort_all(self) -> None:
        """End every request with what it has."""
        for state in [*self.waiting, *self.active]:
            state.cancelled = True
        self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        for state in [state for state in self.waiting if state.cancelled]:
            self.waiting.remove(state)
            self._end(state, aborted=True)
        for state in self.active:
            if state.cancelled:
                state.finish = "abort"
        self._retire()

    def _admit(self) -> None:
        free = self.config.max_batch - len(self.active)
        admitted = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        for group in _prefill_groups(admitted, self.config.prefill_tokens):
            self._prefill(group)
        self._retire()

    def _prefill(self, group: Sequence[Running]) -> None:
        """Process the prompts of a group in the next slots and emit each one's first token."""
        first_slot, lengths = len(self.active), [len(state.tokens) for state in group]
        width = max(lengths)
        device = self.taps.device
        ids = torch.tensor([[*state.tokens, *[0] * (width - len(state.tokens))] for state in group], device=device)
        done = self._target.forward(ids, first_slot, torch.zeros(len(group), dtype=torch.int64, device=device))
        self.taps[first_slot : first_slot + len(group), :width] = done.taps
        ends = torch.tensor(lengths, device=device) - 1
        last = done.last[torch.arange(len(group), device=device), ends]
        if self.drafter:
            self.drafter.filled[first_slot : first_slot + len(group)] = [0] * len(group)
        self.active.extend(group)
        self._emit(group, self._target.logits(last.unsqueeze(1)), [[] for _ in group])

    def _decode(self) -> None:
        active = self.active
        drafts = self._draft()
        width = 1 + max(len(ids) for ids in drafts)
        rows = [
            [state.tokens[-1], *ids, *[0] * (width - 1 - len(ids))] for state, ids in zip(active, drafts, strict=True)
        ]
        device = self.taps.device
        starts = torch.tensor([state.cached for state in active], device=device)
        done = self._target.forward(torch.tensor(rows, device=device), 0, starts)
        slots = torch.arange(len(active), device=device).unsqueeze(1)
        self.taps[slots, starts.unsqueeze(1) + torch.arange(width, device=device)] = done.taps
        taken = self._emit(active, self._target.logits(done.last), drafts)
        for state, ids, count in zip(active, drafts, taken, strict=True):
            state.accepted.append(count - 1)
            state.drafted.append(len(ids))
        self._count([state for state in active if not state.probing])
        self._retire()

    def _draft(self) -> list[list[int]]:
        """Drafts for every active request: never more than could still be emitted before the last token."""
        counts = [min(self.config.num_speculative_tokens, state.limit - state.num_output - 1) for state in self.active]
        if self.drafter:
            counts = [self.drafter.room(state, count) for state, count in zip(self.active, counts, strict=True)]
            if any(counts):
                return self.drafter.propose(self.active, self.taps, counts)
        elif self.config.floor == "ngram":
            return [
                propose_ngram(state.tokens, k=count) if count else []
                for state, count in zip(self.active, counts, strict=True)
            ]
        return [[] for _ in self.active]

    def _emit(self, states: Sequence[Running], logits: Tensor, drafts: Sequence[Sequence[int]]) -> list[int]:
        """Choose, cut and append; how many tokens each request took."""
        chosen = choose(
            states,
            logits,
            drafts,
            logprobs=self.config.capture_logprobs,
            margins=any(state.probing for state in states),
        )
        taken = [state.emit(ids, self._stop_ids) for state, ids in zip(states, chosen.ids, strict=True)]
        for index, (state, count) in enumerate(zip(states, taken, strict=True)):
            if chosen.logprobs:
                state.logprobs += chosen.logprobs[index][:count]
            if chosen.margins and state.probing:
                state.margins += chosen.margins[index][:count]
        return taken

    def _count(self, states: Sequence[Running]) -> None:
        accepted = sum(state.accepted[-1] for state in states)
        before = self.counters
        # One assignment: a reader in another thread never sees half a step.
        self.counters = SpecCounters(
            before.num_steps + len(states),
            before.num_emitted + accepted + len(states),
            before.num_drafted + sum(state.drafted[-1] for state in states),
            before.num_accepted + accepted,
        )

    def _retire(self) -> None:
        """Hand out finished requests and close the gaps."""
        finished = [slot for slot, state in enumerate(self.active) if state.finish]
        ended = [self.active[slot] for slot in finished]
        for slot in reversed(finished):
            last = len(self.active) - 1
            if slot != last:
                length = self.active[last].cached
                self._target.cache.move(last, slot, length)
                self.taps[slot, :length] = self.taps[last, :length]
                if self.drafter:
                    self.drafter.move(last, slot)
                self.active[slot] = self.active[last]
            self.active.pop()
        for state in ended:
            self._end(state, aborted=False)

    def _end(self, state: Running, *, aborted: bool) -> None:
        if aborted:
            state.finish = "abort"
        state.drafter_version = self.drafter_version
        self._on_finish(state)


def _prefill_groups(admitted: Sequence[Running], budget: int) -> list[list[Running]]:
    """Prompts of like length together, each group within `budget` padded positions; the same input, the same groups."""
    ordered = sorted(admitted, key=lambda state: len(state.tokens))
    cuts, start = [0], 0
    for index, state in enumerate(ordered):
        length = len(state.tokens)
        too_wide = length > 2 * len(ordered[start].tokens) + 32
        if index > start and (too_wide or length * (index - start + 1) > budget):
            cuts.append(index)
            start = index
    cuts.append(len(ordered))
    return [list(ordered[left:right]) for left, right in pairwise(cuts) if right > left]

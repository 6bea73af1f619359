"""Chain drafting with an EAGLE-3 drafter over slots (arXiv 2503.01840): the rows of newly processed tokens extend its
own key/value cache, then each further depth is one row a sequence.

Row i pairs the target's features of token i with the embedding of token i+1 and proposes token i+2. A depth row k sits
at position i+k, sees the depth-0 rows <= i and its own earlier depths, and is overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.serving_hooks.embedded.running import Running
from draftloop.serving_hooks.embedded.target_runner import SlotCache, attend, make_span, write_rows
from draftloop.trainers.eagle3 import Eagle3


class EagleRunner:
    """One drafter with its cache. `filled[slot]` depth-0 rows of a slot are valid."""

    def __init__(self, model: Eagle3, embedding: Tensor, num_slots: int, num_rows: int) -> None:
        config = model.config
        self.model = model
        self.filled = [0] * num_slots
        self._embedding = embedding
        self._num_rows = num_rows
        self._groups = config.num_attention_heads // config.num_key_value_heads
        heads = (config.num_key_value_heads, config.head_dim)
        self.cache = SlotCache(1, num_slots, num_rows, heads, model.fc.weight)

    def room(self, state: Running, wanted: int) -> int:
        """How many drafts the drafter's position limit leaves."""
        return max(0, min(wanted, self.model.config.max_position_embeddings - state.cached + 1))

    def move(self, source: int, destination: int) -> None:
        """Give a slot's rows to another slot."""
        self.cache.move(source, destination, self.filled[source])
        self.filled[destination] = self.filled[source]

    def catch_up(self, slot: int, state: Running, taps: Tensor, *, leave: int = 1) -> None:
        """Compute a slot's missing rows but the last `leave`, from stored features taps [slots, rows, N, H]."""
        start, stop = self.filled[slot], state.cached - leave
        if stop > start:
            following = torch.tensor([state.tokens[start + 1 : stop + 1]], device=taps.device)
            first = torch.tensor([start], device=taps.device)
            self._rows(self.model.fuse(taps[slot : slot + 1, start:stop]), following, slot, first)
            self.filled[slot] = stop

    def propose(self, active: Sequence[Running], taps: Tensor, counts: Sequence[int]) -> list[list[int]]:
        """counts[m] drafts for the request in slot m. taps: stored features [slots, rows, N, H]."""
        depth = max(counts)
        for slot, state in enumerate(active):
            if state.cached - self.filled[slot] > depth + 1:
                self.catch_up(slot, state, taps)
        hidden = self._extend(active, taps)
        position = torch.tensor([state.cached - 1 for state in active], device=taps.device)
        columns = [self._best(hidden)]
        for step in range(1, depth):
            hidden = self._rows(hidden.unsqueeze(1), columns[-1].unsqueeze(1), 0, position + step).squeeze(1)
            columns.append(self._best(hidden))
        drafts: list[list[int]] = torch.stack(columns, dim=1).tolist()
        return [ids[:count] for ids, count in zip(drafts, counts, strict=True)]

    def _extend(self, active: Sequence[Running], taps: Tensor) -> Tensor:
        """Add the rows of the tokens processed since; the outputs [M, H] of each sequence's last row."""
        starts = self.filled[: len(active)]
        widths = [state.cached - start for state, start in zip(active, starts, strict=True)]
        width = max(widths)
        following = [
            [*state.tokens[start + 1 :], *[0] * (width - own)]
            for state, start, own in zip(active, starts, widths, strict=True)
        ]
        first = torch.tensor(starts, device=taps.device)
        slots = torch.arange(len(active), device=taps.device).unsqueeze(1)
        features = taps[slots, first.unsqueeze(1) + torch.arange(width, device=taps.device)]
        out = self._rows(self.model.fuse(features), torch.tensor(following, device=taps.device), 0, first)
        for slot, state in enumerate(active):
            self.filled[slot] = state.cached
        return out[slots.squeeze(1), torch.tensor(widths, device=taps.device) - 1]

    def _rows(self, hidden: Tensor, following: Tensor, first_slot: int, starts: Tensor) -> Tensor:
        """The layer on rows [M, W] from position starts on; hidden [M, W, H], following int64 [M, W]."""
        span = make_span(first_slot, starts, following.shape[1], self._num_rows, self._groups, hidden.dtype)
        embeds = F.embedding(following, self._embedding).to(hidden.dtype)
        projected = self.model.project(embeds, hidden, span.positions)
        keys, values = self.cache.keys[0], self.cache.values[0]
        write_rows(keys, span.rows, projected.key)
        write_rows(values, span.rows, projected.value)
        seen = (keys[span.slots, : span.visible], values[span.slots, : span.visible])
        return self.model.finish(attend(projected.query, *seen, span.mask), projected.residual)

    def _best(self, hidden: Tensor) -> Tensor:
        return self.model.to_target_ids(self.model.logits(hidden).argmax(-1))

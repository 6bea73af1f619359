"""Did a drafter change what users get? Compares greedy outputs; pure, no torch.

In fp32 two runs are equal. In bf16 the shape of a forward rounds differently, so two nearly equal best tokens may
change places: that is the only difference that is let pass, and every one is listed.
"""

from __future__ import annotations

from typing import NamedTuple

from draftloop.pipeline.errors import InputError
from draftloop.pipeline.records import ProbeResult


class Divergence(NamedTuple):
    """Where two greedy outputs of one prompt first differ."""

    prompt: int  # index
    position: int  # output token
    margin: float  # the smaller of both runs' logit gaps between the best two tokens there
    tie: bool  # margin <= the margin allowed


class Comparison(NamedTuple):
    """`lossless`: equal, or different at near ties only."""

    lossless: bool
    divergences: tuple[Divergence, ...]

    @property
    def identical(self) -> bool:
        return not self.divergences


def compare_greedy(a: ProbeResult, b: ProbeResult, tie_margin: float) -> Comparison:
    """Compare two probes of the same prompts, up to each one's first difference (after it the contexts differ).

    tie_margin: logit gap up to which two best tokens count as tied; 0 in fp32. Raises InputError where the probes are
    not of the same prompts (another number of outputs) or carry no margins.
    """
    if len(a.output_ids) != len(b.output_ids):
        raise InputError(
            f"probes of {len(a.output_ids)} and {len(b.output_ids)} prompts", mend="probe the same prompts twice"
        )
    for probe in (a, b):
        if [len(ids) for ids in probe.output_ids] != [len(margins) for margins in probe.margins]:
            raise InputError("probe without one margin a token", mend="probe through the engine client")
    found = []
    for prompt, (left, right) in enumerate(zip(a.output_ids, b.output_ids, strict=True)):
        position = _first_difference(left, right)
        if position is not None:
            margin = min(
                (each.margins[prompt][position] for each in (a, b) if position < len(each.output_ids[prompt])),
            )
            both = position < min(len(left), len(right))  # one output that goes on where the other ended is no tie
            found.append(Divergence(prompt, position, margin, both and margin <= tie_margin))
    return Comparison(all(each.tie for each in found), tuple(found))


def _first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    for position, (x, y) in enumerate(zip(left, right, strict=False)):
        if x != y:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))

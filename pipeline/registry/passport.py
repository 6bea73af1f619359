"""The drafter's passport: one page on which a reviewer can decide, and the three pictures that go with it.

The page becomes the description of the registry version, the only place every reviewer opens. It knows nothing of the
judge's types: whoever registers fills `Facts`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from draftloop.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNKNOWN = 1e6  # an interval that reaches here says nothing
_WIDEST = 300.0  # percent; bars end here

CHALLENGER_COLOUR, CHAMPION_COLOUR, ALARM_COLOUR = "#1b6ca8", "#9a9a9a", "#c0392b"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRow:
    """One slice of the held-out requests. ratio = challenger's tau / champion's, with its interval."""

    name: str
    challenger_tau: float
    champion_tau: float
    ratio: float
    low: float
    high: float
    num_conversations: int
    judged: bool = True  # False: too few conversations to decide on
    lost: bool = False  # shown to be worse than the gate tolerates


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What replay showed. Rates: share of steps in which at least k = 1, 2, ... proposals were accepted."""

    challenger_tau: float
    champion_tau: float
    ratio: float
    low: float
    high: float
    confidence: float
    num_conversations: int
    num_tokens: int
    challenger_rates: tuple[float, ...]
    champion_rates: tuple[float, ...]
    slices: tuple[SliceRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What training took."""

    num_steps: int
    num_tokens: int
    seconds: float
    tokens_per_s: float
    peak_memory_mb: int
    gpu_memory_mb: int | None = None  # None: no GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the card says."""

    name: str  # the registered model
    job_key: str
    digest: str
    decision: Literal["passed", "refused", "override"]
    reasons: tuple[str, ...]  # the gate's, as sentences
    target: str  # path or id of the target
    fingerprint: str  # Fingerprint.digest
    snapshot_id: str
    window: Mapping[str, str]  # topic, offsets, policy version: no content
    captured: int
    rejected: Mapping[str, int]  # reason -> records
    num_train: int
    num_heldout: int
    carried: int = 0  # of these rows, taken over from the parent's snapshot
    gain: Gain
    cost: Cost
    champion: str | None  # version compared with; None: the engine's floor
    parents: tuple[str, ...] = ()  # drafter digests, nearest first; empty: trained from the start
    settings: Mapping[str, Any] = field(default_factory=dict)  # of training


def card(facts: Facts) -> str:
    """The decision as markdown. Raises ConfigError where captured != kept + rejected: such a ledger decides nothing."""
    kept = facts.num_train + facts.num_heldout - facts.carried
    if facts.captured != kept + sum(facts.rejected.values()):
        raise ConfigError(
            f"snapshot {facts.snapshot_id[:12]}: {facts.captured} captured, but {kept} kept and "
            f"{sum(facts.rejected.values())} rejected",
            mend="curate the window again",
        )
    sections = [
        _headline(facts),
        _gains(facts),
        _training_data(facts),
        _cost(facts.cost),
        _changes(facts),
        _undo(facts),
    ]
    return "\n\n".join(sections) + "\n"


def tags(facts: Facts) -> dict[str, str]:
    """The five short tags of a version: what fits beside its number in a list."""
    gain = facts.gain
    return {
        "gate": facts.decision,
        "gain": f"{_percent(gain.ratio)} ({_interval(gain.low, gain.high)})",
        "tau": f"{gain.challenger_tau:.3f}",
        "target": facts.fingerprint,
        "digest": facts.digest[:12],
    }


def slice_table(slices: Sequence[SliceRow]) -> dict[str, list[Any]]:
    """The slices as columns, for a table beside the card."""
    names = ("name", "challenger_tau", "champion_tau", "ratio", "low", "high", "num_conversations", "judged", "lost")
    return {name: [getattr(row, name) for row in slices] for name in names}


def plots(gain: Gain, history: Sequence[Mapping[str, float]]) -> dict[str, bytes]:
    """All pictures by file name; a picture without data is left out."""
    found = {"acceptance_by_position.png": position_plot(gain.challenger_rates, gain.champion_rates)}
    if gain.slices:
        found["gain_by_slice.png"] = slice_plot(gain.slices)
    if history:
        found["training.png"] = training_plot(history)
    return found


def position_plot(challenger: Sequence[float], champion: Sequence[float]) -> bytes:
    """PNG: share of steps with at least k accepted proposals, both drafters. They add up to about tau - 1."""
    figure = _figure(6.0, 3.6)
    axes = figure.add_subplot()
    for rates, colour, label in (
        (champion, CHAMPION_COLOUR, "champion"),
        (challenger, CHALLENGER_COLOUR, "challenger"),
    ):
        axes.plot(range(1, len(rates) + 1), rates, "o-", color=colour, label=label)
    axes.set_xticks(range(1, max(len(challenger), len(champion), 1) + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("proposals accepted, at least")
    axes.set_ylabel("share of target steps")
    axes.legend(frameon=False)
    return _png(figure)


def slice_plot(slices: Sequence[SliceRow]) -> bytes:
    """PNG: gain of each slice in percent with its interval; slices too small to judge are drawn hollow."""
    figure = _figure(6.0, 1.4 + 0.35 * len(slices))
    axes = figure.add_subplot()
    for row, place in zip(slices, range(len(slices), 0, -1), strict=True):
        colour = ALARM_COLOUR if row.lost else CHALLENGER_COLOUR
        low, middle, high = (min(100 * (value - 1), _WIDEST) for value in (row.low, row.ratio, row.high))
        axes.plot([low, high], [place, place], color=colour)
        axes.plot(middle, place, "o", color=colour, markerfacecolor=colour if row.judged else "white")
    axes.axvline(0, color=CHAMPION_COLOUR, linewidth=0.8)
    axes.set_ylim(0.4, len(slices) + 0.6)
    axes.set_yticks(range(len(slices), 0, -1), [_plain(f"{row.name} ({row.num_conversations})") for row in slices])
    axes.set_xlabel("gain of tau over the champion, %")
    return _png(figure)


def training_plot(history: Sequence[Mapping[str, float]]) -> bytes:
    """PNG: loss, and tau on held-out requests where it was measured. history: rows of step, loss, heldout_tau."""
    figure = _figure(6.0, 3.6)
    axes = figure.add_subplot()
    loss = [(row["step"], row["loss"]) for row in history if row.get("loss") is not None]
    axes.plot([step for step, _ in loss], [value for _, value in loss], color=CHAMPION_COLOUR, label="loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    tau = [(row["step"], row["heldout_tau"]) for row in history if row.get("heldout_tau") is not None]
    if tau:
        right = axes.twinx()
        right.plot([step for step, _ in tau], [value for _, value in tau], "o-", color=CHALLENGER_COLOUR)
        right.set_ylabel("tau on held-out requests", color=CHALLENGER_COLOUR)
    return _png(figure)


# The sections of the card.


def _headline(facts: Facts) -> str:
    gain = facts.gain
    against = f"champion {facts.champion}" if facts.champion is not None else "the engine without a drafter of its own"
    words = {
        "passed": "The gate passed it",
        "refused": "The gate REFUSED it",
        "override": "OVERRIDE: the gate refused it",
    }
    reasons = "\n".join(f"- {_safe(reason)}" for reason in facts.reasons)
    return (
        f"# {_safe(facts.name)}: tau {gain.champion_tau:.2f} to {gain.challenger_tau:.2f} "
        f"({_percent(gain.ratio)}, {gain.confidence:.0%} interval {_interval(gain.low, gain.high)})\n\n"
        f"**{words[facts.decision]}**, compared with {against} on {gain.num_conversations} held-out conversations "
        f"({gain.num_tokens} tokens) it never trained on.\n\n{reasons}"
    ).rstrip()


def _gains(facts: Facts) -> str:
    lines = [
        "## What it gains",
        "",
        "| slice | champion tau | its tau | gain | interval | conversations | |",
        "|---|---|---|---|---|---|---|",
    ]
    gain = facts.gain
    overall = (gain.champion_tau, gain.challenger_tau, gain.ratio, gain.low, gain.high, gain.num_conversations)
    lines.append(_row("**all**", *overall, note=""))
    for row in facts.gain.slices:
        note = "**loses**" if row.lost else "" if row.judged else "too few to judge"
        values = (row.champion_tau, row.challenger_tau, row.ratio, row.low, row.high, row.num_conversations)
        lines.append(_row(_safe(row.name), *values, note=note))
    rates = ", ".join(f"{rate:.0%}" for rate in gain.challenger_rates)
    before = ", ".join(f"{rate:.0%}" for rate in gain.champion_rates)
    lines += ["", f"At least 1, 2, ... proposals accepted in {rates} of the steps; the champion: {before}."]
    lines += ["tau counts tokens per target step, the target's own token included. Exact replay, not loss."]
    return "\n".join(lines)


def _row(
    name: str, before: float, after: float, ratio: float, low: float, high: float, number: int, *, note: str
) -> str:
    return f"| {name} | {before:.3f} | {after:.3f} | {_percent(ratio)} | {_interval(low, high)} | {number} | {note} |"


def _training_data(facts: Facts) -> str:
    window = "; ".join(f"{_safe(key)} {_safe(value)}" for key, value in sorted(facts.window.items()))
    rejects = ", ".join(f"{_safe(reason)} {count}" for reason, count in sorted(facts.rejected.items())) or "none"
    return (
        "## What it was trained on\n\n"
        f"- Snapshot `{facts.snapshot_id}`\n"
        f"- Window: {window or 'not given'}\n"
        f"- {facts.captured} records captured = {facts.num_train + facts.num_heldout - facts.carried} kept "
        f"+ {sum(facts.rejected.values())} rejected\n"
        f"- {facts.num_train} rows for training, {facts.num_heldout} held out; {facts.carried} of them carried over "
        "from the parent's snapshot\n"
        f"- Rejected: {rejects}\n"
        f"- Target `{_safe(facts.target)}`, fingerprint `{facts.fingerprint}`"
    )


def _cost(cost: Cost) -> str:
    gpu = "" if cost.gpu_memory_mb is None else f", {cost.gpu_memory_mb} MB on the GPU"
    return (
        "## What it cost\n\n"
        f"{cost.seconds:.0f} s for {cost.num_steps} steps over {cost.num_tokens} tokens "
        f"({cost.tokens_per_s:.0f} tokens/s), peak memory {cost.peak_memory_mb} MB{gpu}."
    )


def _changes(facts: Facts) -> str:
    parents = " <- ".join(f"`{digest[:12]}`" for digest in facts.parents)
    lines = ["## What changed", "", f"- Drafter `{facts.digest}`"]
    lines.append(f"- Warm start from {parents}" if parents else "- Trained from the start, without a parent")
    settings = ", ".join(f"{_safe(key)} {_safe(value)}" for key, value in sorted(facts.settings.items()))
    if settings:
        lines.append(f"- Settings: {settings}")
    lines.append(f"- Job `{facts.job_key}`; the same job again makes the same snapshot and finds this version")
    return "\n".join(lines)


def _undo(facts: Facts) -> str:
    if facts.champion is None:
        how = "There is no earlier champion. Remove the alias `champion`, then restart the engine without a drafter."
    else:
        how = f"    draftloop rollback {facts.champion}"
    return (
        "## How to undo it\n\n"
        f"{how}\n\n"
        "The agents follow within one poll. They take it back by themselves, and move the alias, when live acceptance "
        "falls below what is promised here."
    )


def _interval(low: float, high: float) -> str:
    return f"{_percent(low)} to {_percent(high)}" if high < _UNKNOWN else "not known"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%"


def _safe(value: object) -> str:
    """Text from outside, such as a slice's name, that can neither break a table nor bring markup."""
    text = " ".join(str(value).split())
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;")):
        text = text.replace(sign, entity)
    return text


def _plain(text: str) -> str:
    """A label that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"matplotlib is not installed: {error}", mend="pip install 'draftloop[mlflow]'") from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")  # no pyplot: no global state, no display


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for axes in figure.axes:
        axes.spines["top"].set_visible(False)
        axes.spines["right"].set_visible(axes.yaxis.get_ticks_position() == "right")
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})  # equal data, equal bytes
    return buffer.getvalue()

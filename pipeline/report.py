"""The demo's closing table and its HTML report: one file, plots inside, no script and no network."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { font-weight: 600; } h2 { margin-top: 2.2rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid #d9dfe5; text-align: right; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; }
.yes { color: #1a7f37; } .no { color: #b42318; } code { background: #f2f4f7; padding: .1rem .3rem; }
"""


def closing_table(result: dict[str, Any], console: Console | None = None) -> None:
    """The demo's answer for a person, on stderr."""
    table = Table(title=f"draftloop demo, engine: {result['engine']}", title_justify="left")
    for heading in (
        "cycle",
        "tau before",
        "tau after",
        "engine",
        "replay of engine",
        "ratio, 95%",
        "verdict",
        "swap ms",
        "same outputs",
    ):
        table.add_column(heading, justify="left" if heading == "cycle" else "right")
    for number, cycle in enumerate(result["cycles"], start=1):
        low, high = cycle["interval"]
        table.add_row(
            f"{number}: {cycle['domain']}",
            f"{cycle['tau_before']:.3f}",
            f"{cycle['tau_after']:.3f}",
            f"{cycle['tau_engine']:.3f}",
            f"{cycle['tau_replay_of_engine']:.3f}",
            f"{low:.2f}-{high:.2f}",
            cycle["verdict"],
            "-" if cycle["swap_ms"] is None else f"{cycle['swap_ms']:.0f}",
            _same(cycle),
        )
    console = console or Console(stderr=True)
    console.print(table)
    for cycle in result["cycles"]:
        for batch, row in (cycle["speed"] or {}).items():
            console.print(f"speed after {cycle['domain']}, batch {batch}: {row['ratio']:.2f}x of no drafter")
    for line in _vllm_lines(result):
        console.print(line)
    counts = result["counts"]
    console.print(f"captured {counts['captured']}, kept {counts['kept']}, rejected {counts['rejected']}")
    console.print(f"damaged drafter taken back: {'yes' if result['rolled_back'] else 'NO'}")
    console.print(f"{result['seconds']:.0f} s, peak memory {result['peak_rss_mb']} MB, report {result['report']}")


def write_report(path: Path, result: dict[str, Any]) -> None:
    """Write the HTML report of a demo's result."""
    sections = [
        f"<h1>draftloop: one loop, closed</h1><p>Engine: {result['engine']}. Round {result['round']}, "
        f"{result['seconds']:.0f} s, peak memory {result['peak_rss_mb']} MB.</p>",
        "<h2>Cycles</h2>" + _cycles_table(result),
        "<h2>tau over time</h2><p>The live engine's own counters, one point for each batch of traffic; "
        "the colour is the drafter version.</p>" + _img(_plot_timeline(result)),
        "<h2>tau per domain</h2><p>Replay of held-out requests, before and after each cycle.</p>"
        + _img(_plot_domains(result)),
        "<h2>Acceptance by position</h2><p>Share of steps that accept at least k drafts.</p>"
        + _img(_plot_positions(result)),
        "<h2>Training</h2>" + _img(_plot_training(result)),
        "<h2>Speed</h2><p>Wall-clock tokens/s with the drafter over without, interleaved in this run.</p>"
        + _speed_table(result),
        "<h2>The damaged drafter</h2>" + _damaged(result),
        "<h2>Counts</h2>" + _counts(result),
    ]
    told = _vllm_lines(result)
    if told:
        sections.insert(
            2, "<h2>The vLLM server</h2><ul>" + "".join(f"<li>{html.escape(x)}</li>" for x in told) + "</ul>"
        )
    body = "\n".join(sections)
    head = f"<meta charset='utf-8'><title>draftloop report</title><style>{STYLE}</style>"
    page = f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>"
    path.write_text(page)


def _vllm_lines(result: dict[str, Any]) -> list[str]:
    """What was seen of a vLLM server beside the story; empty for the embedded engine."""
    lines = []
    for cycle in result["cycles"]:
        if cycle["tau_counted"] is not None:
            lines.append(
                f"tau after {cycle['domain']}: {cycle['tau_engine']:.3f} emitted, {cycle['tau_counted']:.3f} by vLLM's "
                "own counters, which count past a stop or the length too"
            )
    replayed, restart = result["replayed"], result["restart"]
    if replayed is not None:
        lines.append(
            f"{replayed['num_requests']} captured requests of version {replayed['version']}: tau "
            f"{replayed['tau_replayed']:.4f} by replay, {replayed['tau_emitted']:.4f} emitted a step: "
            f"{replayed['difference']:+.2%}"
        )
    if restart is not None:
        is_champion = "the champion" if restart["boots_with_champion"] else f"NOT the champion {restart['champion']}"
        lines.append(
            f"restarted in {restart['seconds']:.0f} s: it boots with version {restart['version']}, {is_champion}"
        )
    return lines


def _same(cycle: dict[str, Any]) -> str:
    """Whether the canary outputs stayed the same, with the near ties of the target that fell the other way."""
    if cycle["outputs_identical"] is None:
        return "-"
    number = len(cycle["near_ties"])
    ties = f", {number} near tie{'s' if number > 1 else ''}" if number else ""
    return ("yes" if cycle["outputs_identical"] else "NO") + ties


def _same_with_margins(cycle: dict[str, Any]) -> str:
    """The same with each near tie's margin: the logits by which the target's best token led its second best."""
    margins = ", ".join(f"{tie['margin']:.2f}" for tie in cycle["near_ties"] or ())
    return _same(cycle) + (f" (margin {margins})" if margins else "")


def _row(cells: list[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _cycles_table(result: dict[str, Any]) -> str:
    head = [
        "domain",
        "tau before",
        "tau after",
        "engine counters",
        "replay of the engine's outputs",
        "n-gram floor",
        "ratio, 95%",
        "verdict",
        "swap",
        "outputs identical",
    ]
    rows = [_row(head, "th")]
    for cycle in result["cycles"]:
        low, high = cycle["interval"]
        rows.append(
            _row(
                [
                    html.escape(cycle["domain"]),
                    f"{cycle['tau_before']:.3f}",
                    f"{cycle['tau_after']:.3f}",
                    f"{cycle['tau_engine']:.3f}",
                    f"{cycle['tau_replay_of_engine']:.3f}",
                    f"{cycle['tau_floor']:.3f}",
                    f"{low:.3f} to {high:.3f}",
                    html.escape(cycle["verdict"]),
                    "-" if cycle["swap_ms"] is None else f"{cycle['swap_ms']:.0f} ms",
                    html.escape(_same_with_margins(cycle)),
                ]
            )
        )
    reasons = "".join(
        f"<li>cycle {number}: {html.escape('; '.join(cycle['reasons']))}</li>"
        for number, cycle in enumerate(result["cycles"], start=1)
    )
    return f"<table>{''.join(rows)}</table><ul>{reasons}</ul>"


def _mark(good: bool) -> str:
    return f"<span class={'yes' if good else 'no'}>{'yes' if good else 'no'}</span>"


def _speed_table(result: dict[str, Any]) -> str:
    rows = [_row(["after cycle", "batch", "with", "without", "ratio"], "th")]
    for number, cycle in enumerate(result["cycles"], start=1):
        for batch, row in (cycle["speed"] or {}).items():
            rows.append(
                _row(
                    [
                        f"{number}: {html.escape(cycle['domain'])}",
                        str(batch),
                        f"{row['with_tokens_per_s']:.0f} tokens/s",
                        f"{row['without_tokens_per_s']:.0f} tokens/s",
                        f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
                    ]
                )
            )
    return f"<table>{''.join(rows)}</table>"


def _damaged(result: dict[str, Any]) -> str:
    if not result["damaged"]:
        return "<p>Not played: no champion.</p>"
    damaged = result["damaged"]
    return (
        f"<p>Version {html.escape(damaged['version'])} was promoted by hand under a signed override; "
        f"taken back by the agent: {_mark(result['rolled_back'])}.</p><p>{html.escape(damaged['reason'] or '')}</p>"
    )


def _counts(result: dict[str, Any]) -> str:
    counts = result["counts"]
    rejected = "".join(
        _row([html.escape(reason), str(number)]) for reason, number in sorted(counts["rejected"].items())
    )
    hook = html.escape(json.dumps(result["capture"], sort_keys=True))
    return (
        f"<p>{counts['captured']} records read = {counts['kept']} kept + rejected by reason:</p>"
        f"<table>{rejected}</table><p>The hook's counters: <code>{hook}</code></p>"
    )


def _img(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return f"<img alt='plot' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"


def _figure(width: float = 8.0, height: float = 3.2) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _plot_timeline(result: dict[str, Any]) -> Figure:
    figure, axes = _figure()
    points = result["timeline"]
    versions = list(dict.fromkeys(point["version"] for point in points))
    for index, version in enumerate(versions):
        chosen = [point for point in points if point["version"] == version]
        label = f"version {version}" if version else "no drafter"
        places, taus = [point["requests"] for point in chosen], [point["tau"] for point in chosen]
        axes.plot(places, taus, "o", color=f"C{index}", label=label)
    axes.plot([point["requests"] for point in points], [point["tau"] for point in points], color="0.8", zorder=0)
    shift = next((point for point in points if point["domain"] != points[0]["domain"]), None)
    if shift is not None:
        axes.axvline(shift["requests"], color="0.6", linestyle=":")
        axes.annotate(
            f" shift to {shift['domain']}", (shift["requests"], 1), xycoords=("data", "axes fraction"), va="top"
        )
    axes.set(xlabel="requests served", ylabel="tau", ylim=(0.9, None))
    axes.legend(frameon=False)
    return figure


def _plot_domains(result: dict[str, Any]) -> Figure:
    figure, axes = _figure()
    labels, before, after = [], [], []
    for number, cycle in enumerate(result["cycles"], start=1):
        for domain, taus in cycle["by_domain"].items():
            labels.append(f"cycle {number}\n{domain}")
            before.append(taus["before"])
            after.append(taus["after"])
    places = range(len(labels))
    axes.bar([place - 0.2 for place in places], before, 0.4, label="champion", color="0.7")
    axes.bar([place + 0.2 for place in places], after, 0.4, label="challenger", color="C0")
    axes.set_xticks(list(places), labels)
    axes.set(ylabel="tau")
    axes.legend(frameon=False)
    return figure


def _plot_positions(result: dict[str, Any]) -> Figure:
    figure, axes = _figure()
    for label, rates in result["positions"].items():
        axes.plot(range(1, len(rates) + 1), rates, "o-", label=label)
    axes.set(xlabel="position k", ylabel="P(accepted >= k)", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if result["positions"]:
        axes.legend(frameon=False)
    return figure


def _plot_training(result: dict[str, Any]) -> Figure:
    figure, axes = _figure()
    for number, cycle in enumerate(result["cycles"], start=1):
        history = cycle["train"]["history"]
        axes.plot(
            [row["step"] for row in history],
            [row["loss"] for row in history],
            label=f"cycle {number}",
            color=f"C{number - 1}",
        )
    axes.set(xlabel="step", ylabel="loss")
    if result["cycles"]:
        axes.legend(frameon=False)
    return figure

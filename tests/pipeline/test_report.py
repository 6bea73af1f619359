"""The demo's report and table: every number of the result is told, names are escaped, nothing is fetched."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("matplotlib")

from draftloop.pipeline.report import closing_table, write_report


def result(*, cycles: int = 2) -> dict[str, Any]:
    cycle = {
        "domain": "kitchen <b>",
        "tau_before": 1.0,
        "tau_after": 2.125,
        "tau_engine": 2.25,
        "tau_counted": None,
        "tau_replay_of_engine": 2.245,
        "tau_floor": 1.5,
        "interval": (1.9, 2.3),
        "verdict": "promoted",
        "reasons": ["tau 2.125 against 1.000"],
        "swap_ms": 237.4,
        "outputs_identical": True,
        "near_ties": [{"prompt": 1, "position": 4, "margin": 0.125, "tie": True}],
        "by_domain": {"kitchen": {"before": 1.0, "after": 2.125}},
        "train": {"history": [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}]},
        "speed": {
            "1": {"with_tokens_per_s": 30.0, "without_tokens_per_s": 20.0, "ratio": 1.5, "low": 1.4, "high": 1.6}
        },
    }
    point = {"requests": 32, "domain": "kitchen", "tau": 1.0, "version": None, "tokens_per_s": 100.0}
    return {
        "engine": "embedded",
        "replayed": None,
        "restart": None,
        "cycles": [cycle] * cycles,
        "timeline": [point, {**point, "requests": 64, "domain": "python", "tau": 1.1, "version": "1"}],
        "positions": {"cycle 1: challenger": [0.5, 0.3]},
        "counts": {"captured": 12, "kept": 10, "rejected": {"aborted": 2}},
        "capture": {"offered": 13, "delivered": 12, "dropped.policy:no_consent": 1},
        "damaged": {"version": "3", "state": "ROLLED_BACK", "reason": "live tau 1.04 is below 1.78"},
        "rolled_back": True,
        "seconds": 61.2,
        "peak_rss_mb": 1234,
        "round": 0,
        "report": "report.html",
    }


@pytest.mark.parametrize("cycles", [0, 2])
def test_the_report_is_one_file_with_its_plots_inside_and_nothing_to_fetch(tmp_path: Path, cycles: int) -> None:
    write_report(tmp_path / "report.html", result(cycles=cycles))
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page
    assert "<script" not in page
    assert "<b>" not in page, "a name is text, not markup"


def test_the_report_tells_every_number_of_a_cycle(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", result())
    page = (tmp_path / "report.html").read_text()
    for told in (
        "2.125",
        "2.250",
        "2.245",
        "1.500",
        "1.900 to 2.300",
        "237 ms",
        "yes, 1 near tie (margin 0.12)",
        "1.50",
        "aborted",
    ):
        assert told in page, told


def test_the_closing_table_goes_where_it_is_told_and_names_the_rollback() -> None:
    stream = io.StringIO()
    closing_table(result(), Console(file=stream, width=160))
    text = stream.getvalue()
    assert "2.125" in text
    assert "damaged drafter taken back: yes" in text
    assert "batch 1: 1.50x" in text


def test_a_cycle_without_swap_shows_no_swap_time_and_no_claim_about_outputs() -> None:
    seen = result(cycles=1)
    seen["cycles"][0].update(swap_ms=None, outputs_identical=None, near_ties=None, speed=None, verdict="refused")
    stream = io.StringIO()
    closing_table(seen, Console(file=stream, width=160))
    assert "refused" in stream.getvalue()
    assert "yes" not in stream.getvalue().split("captured")[0]


def test_what_was_seen_of_a_vllm_server_stands_in_table_and_report(tmp_path: Path) -> None:
    told = result(cycles=1)
    told["engine"] = "vllm"
    told["cycles"] = [{**told["cycles"][0], "tau_counted": 2.31}]
    told["replayed"] = {
        "version": "1",
        "num_requests": 209,
        "tau_replayed": 1.9714,
        "tau_emitted": 1.9761,
        "difference": 1.9714 / 1.9761 - 1,
    }
    told["restart"] = {"seconds": 41.2, "version": "boot", "champion": "2", "boots_with_champion": False}
    lines = [
        "tau after kitchen <b>: 2.250 emitted, 2.310 by vLLM",
        "209 captured requests of version 1: tau 1.9714 by replay, 1.9761 emitted a step: -0.24%",
        "restarted in 41 s: it boots with version boot, NOT the champion 2",
    ]
    write_report(tmp_path / "report.html", told)
    page = html.unescape((tmp_path / "report.html").read_text())
    written = io.StringIO()
    closing_table(told, Console(file=written, width=400))
    assert [line in page for line in lines] == [True] * 3
    assert [line in written.getvalue() for line in lines] == [True] * 3

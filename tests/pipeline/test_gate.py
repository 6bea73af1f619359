"""The gate as a table: each check alone, all pairs of outcomes, and the numbers in its sentences."""

from __future__ import annotations

import itertools
import random
import re

import msgspec
import pytest
from pydantic import ValidationError

np = pytest.importorskip("numpy")
pytest.importorskip("scipy")

from draftloop.pipeline.judge.gate import GateConfig, Verdict, decide  # noqa: E402
from draftloop.pipeline.judge.report import ReplayReport, RequestReplay  # noqa: E402
from draftloop.pipeline.judge.speed import BatchSpeed, SpeedReport  # noqa: E402

CONFIG = GateConfig(min_conversations=20, min_tokens=1000, num_resamples=400)


def reports(
    gains: dict[str, tuple[float, int]], *, tokens: int = 300, seed: int = 0
) -> tuple[ReplayReport, ReplayReport]:
    """(challenger, champion); gains: slice -> (true ratio of tau, conversations)."""
    rng = random.Random(seed)
    ours, theirs = [], []
    for domain, (gain, count) in gains.items():
        for index in range(count):
            base = tokens / rng.uniform(1.6, 2.4)
            for requests, steps in ((theirs, base), (ours, base / gain * rng.uniform(0.95, 1.05))):
                requests.append(
                    RequestReplay(
                        record_id=f"{domain}{index}",
                        conversation_id=f"{domain}{index}",
                        slices={"domain": domain},
                        num_tokens=tokens,
                        num_steps=round(steps),
                        accepted_at_least=(tokens - round(steps),),
                    )
                )
    return (
        ReplayReport(drafter="challenger", snapshot_id="s", k=1, requests=tuple(ours)),
        ReplayReport(drafter="champion", snapshot_id="s", k=1, requests=tuple(theirs)),
    )


def failed(verdict: Verdict) -> set[str]:
    return {check.check for check in verdict.checks if not check.passed}


def speed(*ratios: tuple[int, float, float]) -> SpeedReport:
    return SpeedReport(
        version="7",
        confidence=0.95,
        results=tuple(
            BatchSpeed(
                batch=batch,
                with_tokens_per_s=100 * (low * high) ** 0.5,
                without_tokens_per_s=100.0,
                ratio=(low * high) ** 0.5,
                low=low,
                high=high,
                pair_ratios=(low, high),
                num_tokens=500,
                num_differing=0,
            )
            for batch, low, high in ratios
        ),
    )


BETTER = {"code": (1.2, 20), "chat": (1.15, 20)}

TABLE = [
    ("better everywhere", BETTER, {}, set()),
    ("equal", {"code": (1.0, 20), "chat": (1.0, 20)}, {}, {"overall"}),
    ("worse everywhere", {"code": (0.8, 20), "chat": (0.8, 20)}, {}, {"overall", "slice"}),
    ("better overall, one slice lost", {"code": (1.5, 40), "chat": (0.8, 15)}, {}, {"slice"}),
    ("a loss within the tolerance", {"code": (1.3, 40), "chat": (0.98, 15)}, {}, set()),
    ("a loss in a slice too small to judge", {"code": (1.3, 40), "chat": (0.7, 5)}, {}, set()),
    ("a gain below the margin", {"code": (1.05, 30), "chat": (1.05, 30)}, {"margin": 0.1}, {"overall"}),
    ("a gain above the margin", {"code": (1.2, 30), "chat": (1.2, 30)}, {"margin": 0.1}, set()),
    ("too few conversations", BETTER, {"min_conversations": 41}, {"size"}),
    ("just enough conversations", BETTER, {"min_conversations": 40}, set()),
    ("too few tokens", BETTER, {"min_tokens": 12001}, {"size"}),
    ("just enough tokens", BETTER, {"min_tokens": 12000}, set()),
    (
        "a lower confidence shows a smaller loss",
        {"code": (1.3, 40), "chat": (0.95, 12)},
        {"confidence": 0.6},
        {"slice"},
    ),
    ("a wide tolerance forgives", {"code": (1.5, 40), "chat": (0.8, 15)}, {"slice_tolerance": 0.3}, set()),
    ("no such label: one slice with everything", {"code": (1.5, 40), "chat": (0.8, 15)}, {"slice_key": "route"}, set()),
    ("nothing to judge", {}, {}, {"size", "overall"}),
    ("one conversation", {"code": (2.0, 1)}, {}, {"size", "overall"}),
]


@pytest.mark.parametrize(("gains", "settings", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_each_case_is_refused_for_exactly_these_checks(
    gains: dict[str, tuple[float, int]], settings: dict[str, object], expected: set[str]
) -> None:
    challenger, champion = reports(gains)
    verdict = decide(challenger, champion, CONFIG.model_copy(update=settings), 0)
    assert failed(verdict) == expected
    assert verdict.passed == (not expected)
    assert verdict.reasons


FAULTS = {
    "size": {"min_conversations": 1000},
    "overall": {"margin": 0.9},
    "slice": {"slice_key": "domain"},
    "speed": {},
}


@pytest.mark.parametrize("faults", [set(c) for n in range(5) for c in itertools.combinations(FAULTS, n)], ids=str)
def test_every_combination_of_failing_checks_is_reported_whole(faults: set[str]) -> None:
    gains = {"code": (1.5, 40), "chat": (0.7 if "slice" in faults else 1.5, 15)}
    settings = {key: value for fault in faults for key, value in FAULTS[fault].items()}
    measured = speed((1, 1.2, 1.3), (8, 0.8, 0.9) if "speed" in faults else (8, 0.95, 1.1))
    verdict = decide(*reports(gains), CONFIG.model_copy(update=settings), 0, speed=measured)
    assert failed(verdict) == faults
    assert verdict.passed == (not faults)
    shown = [check.text for check in verdict.checks if check.passed == (not faults)]
    assert list(verdict.reasons) == shown


def test_every_reason_is_one_short_sentence_with_numbers() -> None:
    cases = [
        decide(*reports(gains), CONFIG.model_copy(update=more), 0, speed=speed((1, 0.8, 0.9)))
        for _, gains, more, _ in TABLE
    ]
    for verdict in cases:
        for check in verdict.checks:
            assert re.search(r"\d", check.text), check.text
            assert len(check.text) < 200
            assert "\n" not in check.text


def test_the_sentences_say_what_was_measured() -> None:
    challenger, champion = reports({"code": (1.5, 40), "chat": (0.8, 15)})
    verdict = decide(challenger, champion, CONFIG, 0)
    lost = next(result for result in verdict.slices if result.value == "chat")
    assert (lost.judged, lost.lost, lost.comparison.num_conversations) == (True, True, 15)
    assert verdict.reasons == (
        f"slice domain=chat loses: ratio {lost.comparison.ratio:.3f} ({lost.comparison.low:.3f} to "
        f"{lost.comparison.high:.3f}) over 15 conversations, upper bound below 0.970",
    )
    assert lost.challenger_tau == challenger.tau_by_slice("domain")["chat"]
    assert lost.champion_tau == champion.tau_by_slice("domain")["chat"]
    assert [result.value for result in verdict.slices] == ["chat", "code"]


def test_on_day_zero_the_floor_is_the_champion() -> None:
    challenger, champion = reports(BETTER)
    floor = msgspec.structs.replace(
        champion,
        drafter="none",
        requests=tuple(
            msgspec.structs.replace(request, num_steps=request.num_tokens, accepted_at_least=(0,))
            for request in champion.requests
        ),
    )
    verdict = decide(challenger, floor, CONFIG, 0)
    assert verdict.passed
    assert verdict.champion == "none"
    assert verdict.champion_tau == 1.0
    assert "against 1.000 of none" in next(check.text for check in verdict.checks if check.check == "overall")


def test_equal_arguments_give_equal_verdicts_and_a_verdict_survives_json() -> None:
    challenger, champion = reports(BETTER)
    verdict = decide(challenger, champion, CONFIG, 3, speed=speed((1, 1.1, 1.3)))
    assert decide(challenger, champion, CONFIG, 3, speed=speed((1, 1.1, 1.3))) == verdict
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


def test_many_harmless_slices_refuse_no_more_often_than_one() -> None:
    """Holm: 10 slices that lose exactly the tolerance refuse in 2.5% of gates at most, plus 3 standard errors."""
    trials, refused = 200, 0
    config = CONFIG.model_copy(update={"num_resamples": 1000, "slice_tolerance": 0.03})
    for trial in range(trials):
        gains = {f"d{index}": (0.97, 10) for index in range(10)}
        verdict = decide(*reports(gains, seed=trial, tokens=2000), config, trial)
        refused += "slice" in failed(verdict)
    assert refused / trials <= 0.025 + 3 * (0.025 * 0.975 / trials) ** 0.5


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValidationError, match="slice_keys"):
        GateConfig(slice_keys="domain")  # type: ignore[call-arg]

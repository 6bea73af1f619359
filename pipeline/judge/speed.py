"""What a drafter is worth in tokens per second: measured with and without it in one run, and the theory beside it.

Measured: the same requests, arms interleaved ABBA so that drift of the machine cancels, one log ratio per pair.
Theory (arXiv 2211.17192, 2406.14066): speedup = tau T(plain) / (T_draft + T_verify + T_over); break-even tau is where
that is 1. Times in seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from draftloop.pipeline.errors import InputError
from draftloop.pipeline.records import Swapped

UNBOUNDED = 1e9  # upper end of an interval from one pair (JSON has no infinity)


class SpeedEngine(Protocol):
    """What a measurement asks of an engine; requests and completions are the engine's own."""

    def generate(self, requests: Sequence[Any]) -> Sequence[Any]:
        """Completions, in order, with `output_ids`."""

    def swap(self, folder: Path | None, version: str | None) -> Swapped: ...


class SpeedProgress(NamedTuple):
    """How far a measurement is."""

    runs: int
    total_runs: int


class BatchSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One batch size. tokens/s over whole requests, prefill included; interval: t over the pairs' log ratios."""

    batch: int
    with_tokens_per_s: float
    without_tokens_per_s: float
    ratio: float  # geometric mean over pairs
    low: float
    high: float
    pair_ratios: tuple[float, ...]
    num_tokens: int  # of one run of one arm
    num_differing: int  # requests whose output differs between the arms (greedy: numerical ties only)


class SpeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """With a drafter against without, in one run on one engine."""

    version: str
    confidence: float
    results: tuple[BatchSpeed, ...]

    def by_batch(self) -> dict[str, dict[str, Any]]:
        """Plain JSON values by batch size."""
        return {str(result.batch): msgspec.to_builtins(result) for result in self.results}

    def to_json(self) -> bytes:
        """JSON that from_json reads back to an equal report."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes | str) -> SpeedReport:
        """Raises InputError for anything that is not a speed report."""
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InputError(f"not a speed report: {error}", mend="measure again") from error


def measure(
    engine: SpeedEngine,
    with_drafter: tuple[Path, str],
    requests: Sequence[Any],
    *,
    batches: Sequence[int] = (1, 8),
    pairs: int = 4,
    confidence: float = 0.95,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[SpeedProgress], None] | None = None,
) -> SpeedReport:
    """Measure tokens/s with and without a drafter at each batch size (requests go in groups of that many).

    For an engine nobody else uses: the drafter is taken out and put back between runs, and stays loaded at the end.
    One untimed run per arm and batch size comes first. Raises InputError for an empty or useless plan.
    """
    if not requests or not batches or pairs < 1 or min(batches) < 1:
        raise InputError(
            f"speed of {len(requests)} requests at batches {list(batches)} in {pairs} pairs cannot be measured",
            mend="give at least one request, batch sizes >= 1 and one pair",
        )
    bench = _Bench(engine, with_drafter, requests, clock, on_progress, len(batches) * (2 * pairs + 2))
    with bench.leaving_the_drafter_loaded():
        results = tuple(bench.one_batch(batch, pairs, confidence) for batch in batches)
    return SpeedReport(version=with_drafter[1], confidence=confidence, results=results)


class _Run(NamedTuple):
    seconds: float
    outputs: list[tuple[int, ...]]

    @property
    def rate(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


class _Bench:
    """One engine, its two arms, and the count of runs done."""

    def __init__(
        self,
        engine: SpeedEngine,
        with_drafter: tuple[Path, str],
        requests: Sequence[Any],
        clock: Callable[[], float],
        on_progress: Callable[[SpeedProgress], None] | None,
        total_runs: int,
    ) -> None:
        self._engine = engine
        self._arms: Mapping[bool, tuple[Path | None, str | None]] = {True: with_drafter, False: (None, None)}
        self._loaded: bool | None = None
        self._requests = requests
        self._clock = clock
        self._on_progress = on_progress
        self._runs, self._total_runs = 0, total_runs

    @contextmanager
    def leaving_the_drafter_loaded(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._load(True)

    def one_batch(self, batch: int, pairs: int, confidence: float) -> BatchSpeed:
        self._run(True, batch)
        self._run(False, batch)
        runs: dict[bool, list[_Run]] = {True: [], False: []}
        for index in range(pairs):
            for drafting in (True, False) if index % 2 else (False, True):  # ABBA
                runs[drafting].append(self._run(drafting, batch))
        ratios = [drafted.rate / plain.rate for drafted, plain in zip(runs[True], runs[False], strict=True)]
        ratio, low, high = geometric_interval(ratios, confidence=confidence)
        outputs = runs[True][0].outputs, runs[False][0].outputs
        return BatchSpeed(
            batch=batch,
            with_tokens_per_s=_total_rate(runs[True]),
            without_tokens_per_s=_total_rate(runs[False]),
            ratio=ratio,
            low=low,
            high=high,
            pair_ratios=tuple(ratios),
            num_tokens=sum(map(len, outputs[0])),
            num_differing=sum(drafted != plain for drafted, plain in zip(*outputs, strict=True)),
        )

    def _run(self, drafting: bool, batch: int) -> _Run:
        self._load(drafting)
        groups = [self._requests[start : start + batch] for start in range(0, len(self._requests), batch)]
        started = self._clock()
        completions = [completion for group in groups for completion in self._engine.generate(group)]
        seconds = self._clock() - started
        self._runs += 1
        if self._on_progress is not None:
            self._on_progress(SpeedProgress(self._runs, self._total_runs))
        return _Run(seconds, [tuple(completion.output_ids) for completion in completions])

    def _load(self, drafting: bool) -> None:
        if self._loaded == drafting:
            return
        self._engine.swap(*self._arms[drafting])
        self._loaded = drafting


def _total_rate(runs: Sequence[_Run]) -> float:
    return sum(len(output) for run in runs for output in run.outputs) / sum(run.seconds for run in runs)


def geometric_interval(ratios: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float, float]:
    """Geometric mean of positive ratios and its t interval: (mean, low, high). One ratio leaves it unbounded."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, UNBOUNDED
    from scipy import stats  # a third of a second: only when a number is asked for

    sd = math.sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    half = float(stats.t.ppf(0.5 + confidence / 2, len(logs) - 1)) * sd / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


class StepTimes(NamedTuple):
    """Seconds of one step at one batch size and context."""

    plain: float  # target step of one token a sequence, no drafter
    draft: float  # all K draft tokens
    verify: float  # target step of K + 1 tokens a sequence
    overhead: float = 0.0  # sampling, bookkeeping, launches


def break_even_tau(times: StepTimes) -> float:
    """tau below which drafting costs more than it gains."""
    return (times.draft + times.verify + times.overhead) / times.plain


def speedup(tau: float, times: StepTimes) -> float:
    """Decode speed with drafting over without."""
    return tau / break_even_tau(times)


def end_to_end_speedup(decode_speedup: float, *, decode_share: float) -> float:
    """Speedup of whole requests where only `decode_share` of the time without a drafter is decoding."""
    return 1 / (1 - decode_share + decode_share / decode_speedup)


def tau_at(position_rates: Sequence[float], k: int) -> float:
    """tau if only the first k drafts were proposed: 1 + a_1 + ... + a_k (a_k does not depend on later drafts)."""
    return 1 + sum(position_rates[:k])


def independent_tau(alpha: float, k: int) -> float:
    """(1 - alpha^(k+1)) / (1 - alpha): tau if every draft token were accepted independently with probability alpha."""
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def best_k(position_rates: Sequence[float], times: Mapping[int, StepTimes]) -> tuple[int, float]:
    """(K, speedup) of the most profitable number of drafts; (0, 1.0) where none pays. times: by K, at one load."""
    gains = {k: speedup(tau_at(position_rates, k), times[k]) for k in sorted(times)}
    k = max(gains, key=gains.__getitem__, default=0)
    return (k, gains[k]) if k and gains[k] > 1 else (0, 1.0)


class Machine(NamedTuple):
    """Measured ceilings of one accelerator."""

    bytes_per_s: float
    flops_per_s: float
    launch_s: float = 0.0  # fixed cost of a step


class ModelCost(NamedTuple):
    """What one step of a model moves and computes."""

    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float  # 2 x parameters
    flops_per_token_and_context: float = 0.0  # 4 x attention width x layers


def roofline_step_s(machine: Machine, model: ModelCost, *, batch: int, tokens: int, context: int) -> float:
    """Lower bound of a step of `tokens` tokens a sequence: max(memory traffic, arithmetic) + launch."""
    moved = model.weight_bytes + batch * context * model.kv_bytes_per_token
    computed = batch * tokens * (model.flops_per_token + model.flops_per_token_and_context * context)
    return max(moved / machine.bytes_per_s, computed / machine.flops_per_s) + machine.launch_s

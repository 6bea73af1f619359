"""What swaps, drafting and capture cost on a real vLLM server: each beside the same run without it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftloop.pipeline import artifact
from draftloop.pipeline.bench_site import A, B, Site, median_interval, spread
from draftloop.pipeline.completions import Answer, Completions, Streamed, streaming
from draftloop.pipeline.data.snapshot import Row
from draftloop.pipeline.judge.gate import decide
from draftloop.pipeline.judge.replay import replay
from draftloop.pipeline.judge.verdict import override, sign
from draftloop.pipeline.ui import Screen
from draftloop.pipeline.vllm_server import MODEL_NAME, VllmServer
from draftloop.pipeline.vllm_service import TwoServers
from draftloop.trainers.checkpoint import open_drafter

if TYPE_CHECKING:
    from draftloop.pipeline.judge.speed import SpeedProgress

UNKNOWN_MARGIN = 1e9  # one output goes on where the other ended (JSON has no infinity)


# Swaps.


def bench_swap(site: Site, *, swaps: int, streams: int, screen: Screen) -> dict[str, Any]:
    """Swap a -> b -> a ... under load, beside the same load without swaps; outputs are compared token by token."""
    with screen.bar("outputs without load", len(site.requests)) as advance:
        wanted = site.completions.run(site.requests, stream=lambda index: False, on_done=advance)
    _sign(site, wanted)
    inspected = site.admin("/inspect", {})["workers"]
    quiet_s = max(10.0, swaps * 1.0)
    with screen.bar("load without swaps", int(quiet_s)) as advance, _loaded(site, streams) as quiet:
        _wait(quiet_s, advance)
    pauses, took, memory = [], [], []
    with screen.bar("load with swaps", swaps) as advance, _loaded(site, streams) as busy:
        for number in range(swaps):
            version = A if number % 2 else B
            began = time.perf_counter()
            pauses.append(site.client.swap(site.journal.place(version), version).pause_ms)
            took.append((time.perf_counter() - began) * 1000)
            memory.append(site.server.rss_mb())
            advance(number + 1, f"{statistics.median(pauses):.0f} ms median pause")
            time.sleep(0.5)
    after = site.admin("/inspect", {})["workers"]
    outputs = Outputs(site, wanted)
    settled = memory[len(memory) // 4 :]  # the first swaps fill pools that are kept
    return {
        "swaps": swaps,
        "streams": streams,
        "dtype": site.target.fingerprint.dtype,
        "pause_ms": spread(pauses),
        "swap_ms": spread(took),
        "gap_ms": {"with_swaps": spread(_gaps(busy)), "without": spread(_gaps(quiet))},
        "requests": {
            "served": len(busy.answers),
            "failed": len(busy.failures) + len(quiet.failures),
            "truncated": sum(outputs.is_truncated(answer) for answer in busy.answers),
        },
        "outputs": {"with_swaps": outputs.compare(busy.answers), "without": outputs.compare(quiet.answers)},
        "memory_mb": {
            "first": memory[0],
            "last": memory[-1],
            "most": max(memory),
            "growth_after_first_quarter": settled[-1] - settled[0],
        },
        "target_unchanged": [each["target"] for each in inspected] == [each["target"] for each in after],
        "drafter_as_loaded": not any(each["differing"] for each in after),
    }


def _sign(site: Site, answers: Sequence[Answer]) -> None:
    """A signed verdict that lets b in: by replay of what the server just wrote, overridden where the gate refuses."""
    fingerprint, config = site.target.fingerprint, site.workspace.config
    drafters = {
        name: open_drafter(site.journal.place(version), fingerprint=fingerprint)
        for name, version in (("challenger", B), ("champion", A))
    }
    rows = [
        Row(each.request_id, each.request_id, list(each.prompt_ids), list(each.output_ids), {}, 0.0, [])
        for each in answers
    ]
    reports = replay(site.target, drafters, rows, k=config.replay.num_speculative_tokens, snapshot_id="bench")
    key = site.workspace.signing_key()
    document = sign(
        decide(reports["challenger"], reports["champion"], config.gate, config.seed),
        digest=drafters["challenger"].digest,
        fingerprint=fingerprint,
        snapshot_id="bench",
        champion_digest=drafters["champion"].digest,
        job_key="bench",
        key=key,
    )
    if document["decision"] == "refused":
        document = override(document, by="bench swap", reason="only swaps are measured", key=key)
    artifact.write_json(site.journal.verdict_file(B), document)


@contextmanager
def _loaded(site: Site, streams: int) -> Iterator[Streamed]:
    with streaming(site.completions, site.requests, streams=streams) as seen:
        time.sleep(1.0)  # all streams run
        yield seen


def _wait(seconds: float, advance: Callable[[int], None]) -> None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        advance(int(passed))
        time.sleep(0.25)
    advance(int(seconds))


def _gaps(seen: Streamed) -> list[float]:
    return [gap * 1000 for answer in seen.answers for gap in answer.gaps]


class Outputs:
    """What each prompt's output should be, and how far another one is from it."""

    def __init__(self, site: Site, wanted: Sequence[Answer]) -> None:
        self._site = site
        self._wanted = {answer.request_id: answer for answer in wanted}
        self._known: dict[tuple[str, int, int, int], float] = {}
        self._tie = 0.0 if site.target.fingerprint.dtype == "float32" else site.workspace.config.agent.tie_margin

    def of(self, answer: Answer) -> tuple[int, ...]:
        """The output wanted for the same prompt."""
        return self._wanted[answer.request_id.partition("#")[0]].output_ids

    def is_truncated(self, answer: Answer) -> bool:
        """Whether it is a proper beginning of what it should be."""
        wanted = self.of(answer)
        return len(answer.output_ids) < len(wanted) and wanted[: len(answer.output_ids)] == answer.output_ids

    def compare(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Identical, or different first at a near tie of the target's best two tokens; in fp32 nothing else passes."""
        margins = [self._margin(answer) for answer in answers if answer.output_ids != self.of(answer)]
        return {
            "compared": len(answers),
            "identical": len(answers) - len(margins),
            "near_ties": sum(margin <= self._tie for margin in margins) if self._tie else 0,
            "others": sum(margin > self._tie for margin in margins) if self._tie else len(margins),
            "largest_margin": max(margins, default=0.0),
        }

    def _margin(self, answer: Answer) -> float:
        """By how much the target prefers its best token to the worse of the two where the outputs part."""
        wanted, found = self.of(answer), answer.output_ids
        place = next(
            (index for index, (x, y) in enumerate(zip(wanted, found, strict=False)) if x != y),
            min(len(wanted), len(found)),
        )
        if place >= min(len(wanted), len(found)):
            return UNKNOWN_MARGIN
        name = answer.request_id.partition("#")[0]
        key = (name, place, wanted[place], found[place])
        if key not in self._known:
            both = [list(wanted[: place + 1]), list(found[: place + 1])]
            scores = self._site.client.score([answer.prompt_ids] * 2, both)
            self._known[key] = max(margins[-1] for margins in scores.margins)
        return self._known[key]


# Speed.


def bench_speed(site: Site, *, batches: Sequence[int], pairs: int, num_requests: int, screen: Screen) -> dict[str, Any]:
    """Output tokens/s with the first drafter over a second server without one, interleaved in this run."""
    from draftloop.pipeline.judge.speed import measure

    config = site.workspace.config
    plain = VllmServer(
        config.vllm.model_copy(update={"port": 0}),
        site.workspace.root,
        target=Path(site.target.folder),
        dtype=site.target.fingerprint.dtype,
        drafter=None,
    )
    screen.say(f"a second server starts, without a drafter, log {plain.log}")
    with plain:
        client = Completions(plain.url, MODEL_NAME, streams=max(batches))
        before = site.client.counters()
        with screen.bar("speed", 1) as advance:

            def show(seen: SpeedProgress) -> None:
                advance.total(seen.total_runs)
                advance(seen.runs)

            report = measure(
                TwoServers(site.completions, client),
                (site.journal.place(A), A),
                site.requests[:num_requests],
                batches=batches,
                pairs=pairs,
                on_progress=show,
            )
        client.close()
    tau = site.client.counters().since(before).tau
    return {"tau": tau, "pairs": pairs, "dtype": site.target.fingerprint.dtype, "batches": report.by_batch()}


# Capture.


def bench_capture(site: Site, *, pairs: int, streams: int, screen: Screen) -> dict[str, Any]:
    """Output tokens/s with capture on over off, interleaved by the admin route; median of pairs with its interval."""
    runs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    def run(*, enabled: bool) -> tuple[float, float]:
        site.admin("/capture", {"enabled": enabled})
        cpu, began = _cpu_s(site.server), time.perf_counter()
        answers = site.completions.run(site.requests, stream=lambda index: index % 2 == 0)
        seconds = time.perf_counter() - began
        return sum(len(answer.output_ids) for answer in answers) / seconds, _cpu_s(site.server) - cpu

    with screen.bar("capture on and off", pairs) as advance:
        run(enabled=True)
        for number in range(pairs):
            for enabled in (True, False) if number % 2 else (False, True):  # ABBA: drift cancels
                runs[enabled].append(run(enabled=enabled))
            advance(number + 1)
    site.admin("/capture", {"enabled": True})
    ratios = [on[0] / off[0] for on, off in zip(runs[True], runs[False], strict=True)]
    low, high = median_interval(ratios, seed=site.workspace.config.seed)
    capture = site.client.status()["capture"]
    return {
        "pairs": pairs,
        "streams": streams,
        "requests_a_run": len(site.requests),
        "on_tokens_per_s": statistics.median(rate for rate, _ in runs[True]),
        "off_tokens_per_s": statistics.median(rate for rate, _ in runs[False]),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "ratios": ratios,
        "api_cpu_s": {
            "on": statistics.median(cpu for _, cpu in runs[True]),
            "off": statistics.median(cpu for _, cpu in runs[False]),
        },
        "serving_us": capture["serving_us"],
        "counters": capture["counters"],
    }


def _cpu_s(server: VllmServer) -> float:
    """CPU seconds of the API server's process so far, the serving thread's and the sender's."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""Questions to the running engine that are not traffic: what does it answer, how sure is it, how well does it draft?

They run as requests among the others, are never captured and stand in no counter of traffic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from draftloop.pipeline.errors import InputError
from draftloop.pipeline.records import SpecCounters
from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.middleware import internal

MAX_PROMPTS = 64
MAX_TOKENS = 1024


class ProbeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /probe. speculate: False asks for one token a request, in which no drafter has a part.

    seed None: the engine's own random numbers. vLLM 0.32 on a CPU dies of a seeded request at a temperature whose
    prompt is prefilled in pieces ("CPU Generator does not use offset"): a seed is for engines known to bear it.
    """

    prompts: list[list[int] | str]
    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    speculate: bool = True


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /score."""

    prompts: list[list[int]]
    outputs: list[list[int]]


class _Answer(msgspec.Struct):
    ids: list[int] = []
    margins: list[float] = []
    logprobs: list[float] = []
    accepted: list[int] = []  # per target step
    drafted: list[int] = []


async def probe(engine: Any, request: ProbeRequest) -> dict[str, Any]:
    """Ask all prompts at once. Returns {"output_ids", "margins", "logprobs", "counters"}. Raises InputError."""
    _check(request.prompts, request.max_tokens)
    if not request.max_tokens > 0 <= request.temperature:
        raise InputError("max_tokens must be above 0, temperature not below", mend="send 16 and 0.0")
    ask = _ask if request.speculate else _ask_by_token
    with internal():
        answers = await asyncio.gather(
            *(ask(engine, prompt, request, _seed(request, index)) for index, prompt in enumerate(request.prompts))
        )
    return {
        "output_ids": [answer.ids for answer in answers],
        "margins": [answer.margins for answer in answers],
        "logprobs": [answer.logprobs for answer in answers],
        "counters": msgspec.to_builtins(_counters(answers)),
    }


async def score(engine: Any, request: ScoreRequest) -> dict[str, Any]:
    """What the target alone thinks of given outputs. Returns {"logprobs", "ranks", "margins"}. Raises InputError."""
    if len(request.prompts) != len(request.outputs):
        raise InputError(
            f"{len(request.prompts)} prompts, {len(request.outputs)} outputs", mend="send one output a prompt"
        )
    tokens = max(map(len, request.outputs), default=0)
    _check(request.prompts, tokens)
    _check(request.outputs, tokens)
    with internal():
        pairs = zip(request.prompts, request.outputs, strict=True)
        rows = await asyncio.gather(*(_score_one(engine, prompt, output) for prompt, output in pairs))
    return {key: [row[key] for row in rows] for key in ("logprobs", "ranks", "margins")}


def _seed(request: ProbeRequest, index: int) -> int | None:
    """A seed for each text; its tokens count on from there, and no two texts' ever meet."""
    return None if request.seed is None else (request.seed + index) * MAX_TOKENS


async def warm_up(engine: Any) -> None:
    """Have vLLM compile what counts the ranks of log-probabilities, for one row and for several.

    It does so when first asked, for seconds in which no request advances: better before there are any.
    """
    for prompts in ([[1, 1]], [[1, 1], [1, 1, 1], [1, 1, 1, 1]]):
        await probe(engine, ProbeRequest(prompts=list(prompts), max_tokens=4))
    await score(engine, ScoreRequest(prompts=[[1, 1]], outputs=[[1, 1, 1]]))


def _check(prompts: Sequence[object], tokens: int) -> None:
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise InputError(f"{len(prompts)} prompts", mend=f"send 1 to {MAX_PROMPTS}")
    if any(len(prompt) == 0 for prompt in prompts if isinstance(prompt, list | str)):
        raise InputError("a prompt or output is empty", mend="send at least one token")
    if tokens > MAX_TOKENS:
        raise InputError(f"{tokens} tokens", mend=f"ask for at most {MAX_TOKENS}")


async def _ask(engine: Any, prompt: list[int] | str, request: ProbeRequest, seed: int | None) -> _Answer:
    answer = _Answer()
    parameters = versions.sampling(
        max_tokens=request.max_tokens, temperature=request.temperature, seed=seed, logprobs=2
    )
    choice = await _last(engine, prompt, parameters)
    _add(answer, choice)
    drafts = choice.spec_decode_metrics
    if drafts is not None:
        answer.accepted = list(drafts.per_step_accepted or ())
        answer.drafted = list(drafts.per_step_drafted or ())
    return answer


async def _ask_by_token(engine: Any, prompt: list[int] | str, request: ProbeRequest, seed: int | None) -> _Answer:
    answer = _Answer()
    ids = list(engine.get_tokenizer().encode(prompt)) if isinstance(prompt, str) else list(prompt)
    for step in range(request.max_tokens):
        parameters = versions.sampling(
            max_tokens=1, temperature=request.temperature, seed=None if seed is None else seed + step, logprobs=2
        )
        choice = await _last(engine, [*ids, *answer.ids], parameters)
        _add(answer, choice)
        if choice.finish_reason != "length":
            break
    return answer


def _add(answer: _Answer, choice: Any) -> None:
    for token, top in zip(choice.token_ids, choice.logprobs, strict=True):
        best = sorted((entry.logprob for entry in top.values()), reverse=True)
        answer.ids.append(int(token))
        answer.logprobs.append(float(top[token].logprob))
        answer.margins.append(float(best[0] - best[1]))


async def _score_one(engine: Any, prompt: list[int], output: list[int]) -> dict[str, list[float]]:
    parameters = versions.sampling(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    tables = (await _whole(engine, [*prompt, *output], parameters)).prompt_logprobs[len(prompt) :]
    entries = [table[token] for token, table in zip(output, tables, strict=True)]
    best = [max(entry.logprob for entry in table.values()) for table in tables]
    return {
        "logprobs": [float(entry.logprob) for entry in entries],
        "ranks": [int(entry.rank) for entry in entries],
        "margins": [float(top - entry.logprob) for top, entry in zip(best, entries, strict=True)],
    }


async def _last(engine: Any, prompt: list[int] | str, parameters: Any) -> Any:
    return (await _whole(engine, prompt, parameters)).outputs[0]


async def _whole(engine: Any, prompt: list[int] | str, parameters: Any) -> Any:
    given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    final = None
    try:
        async for output in engine.generate(given, parameters, versions.request_id()):
            final = output
    except (ValueError, versions.client_error()) as error:  # too long, an id outside the vocabulary
        raise InputError(str(error), mend="send prompts this engine can run") from None
    assert final is not None
    return final


def _counters(answers: Sequence[_Answer]) -> SpecCounters:
    steps = sum(len(answer.drafted) for answer in answers)
    emitted = sum(len(answer.ids) - 1 for answer in answers if answer.drafted)
    return SpecCounters(
        steps,
        emitted,
        sum(sum(answer.drafted) for answer in answers),
        sum(sum(answer.accepted) for answer in answers),
    )

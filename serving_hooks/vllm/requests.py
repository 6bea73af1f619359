"""The capture point: each choice of each request, from its start to its end.

vLLM makes one RequestState a choice, in the context of the HTTP request, and asks it for its last output once, however
it ends: stop, length, a client that left. Whether a choice may be kept is decided at its start, and only what may is
watched.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import wraps
from time import thread_time
from typing import Any

from draftloop.pipeline.records import FinishReason, Sampling
from draftloop.serving_hooks.finished import FinishedRequest
from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.counting import discount_internal, install_counting
from draftloop.serving_hooks.vllm.middleware import Identity, caller, is_internal
from draftloop.serving_hooks.vllm.runtime import Runtime, current

# What vLLM may say: an error of the engine's ends a request as an abort does, repetition as a stop of its own.
_ENDS: dict[str, FinishReason] = {"stop": "stop", "repetition": "stop", "length": "length"}
# Memory of a state that waits to be packed: its objects and strings, a gateway's headers among them; and of each token
# its id and its text.
_STATE_BYTES, _TOKEN_BYTES = 8192, 56
_LOGPROB_BYTES = 600  # of the objects vLLM makes for a token's log-probabilities
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,96}")
_OWN, _STEP = "_new_completion_output", "make_request_output"


def install() -> None:
    """Watch vLLM's requests; once a process."""
    kind = versions.request_state()
    plain = kind.from_new_request.__func__
    if not hasattr(plain, "__wrapped__"):
        kind.from_new_request = classmethod(_beginning(plain))
        engine = versions.async_llm()
        engine.shutdown = _shutting_down(engine.shutdown)
    install_counting()


def capture_status() -> dict[str, Any]:
    """What capture is doing, for the status route."""
    runtime = current()
    hook = runtime.hook
    return {
        "capturing": runtime.capturing and hook is not None,
        "counters": None if hook is None else hook.counters(),
        "last_error": None if hook is None else hook.last_error,
        "serving_us": runtime.timing.summary(),
    }


def _beginning(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def from_new_request(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = plain(cls, *args, **kwargs)
        try:
            _begin(current(), state, kwargs["request"] if "request" in kwargs else args[1])
        except Exception:  # noqa: BLE001  outermost guard: capture never fails a request
            _count_fault()
        return state

    return from_new_request


def _shutting_down(plain: Callable[..., None]) -> Callable[..., None]:
    """With its engine stopped a server waits for clients to hang up, which may be never: what ran has ended here."""

    @wraps(plain)
    def shutdown(*args: Any, **kwargs: Any) -> None:
        try:
            plain(*args, **kwargs)
        finally:
            end_all(current())

    return shutdown


def _begin(runtime: Runtime, state: Any, request: Any) -> None:
    if is_internal():
        discount_internal(runtime, state)
        return
    hook, params = runtime.hook, request.sampling_params
    if hook is None or not runtime.capturing or params is None:  # None: pooling, nothing is generated
        return
    begun = thread_time()
    identity, parent = caller(), state.parent_req
    name = state.request_id if parent is None else parent.request_id
    if hook.admits(identity.tenant, name, identity.asserted):
        unfit = _unfit(request)
        if unfit is None:
            choice = _Choice(runtime, name, identity, state, params)
            setattr(state, _OWN, choice)
            if params.stop or params.structured_outputs is not None:
                setattr(state, _STEP, _stepping(choice, getattr(state, _STEP)))
            choice.cost = thread_time() - begun
            return
        hook.refuse(unfit)
    runtime.timing.add(thread_time() - begun)


def _unfit(request: Any) -> str | None:
    """Why a request is not the target answering its tokens, as the fingerprint means it."""
    if request.lora_request is not None:
        return "lora"
    if request.resumable:  # its prompt grows while it is answered
        return "streaming_input"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt_embeddings"
    if request.mm_features:
        return "multimodal"
    if request.sampling_params.max_tokens == 1 and versions.is_beam(request):
        return "beam_search"
    return None


class _Choice:
    """A choice under watch. It stands in for its state's own method until that has given the last output.

    What it costs is paid by the event loop, so that it only notes what changes later: the rest is read off the state,
    which nobody touches any more, where the record is made.
    """

    __slots__ = (
        "_drafter",
        "_end",
        "_epoch",
        "_identity",
        "_name",
        "_num_outputs",
        "_params",
        "_plain",
        "_runtime",
        "_state",
        "cost",
        "emitted",
    )

    def __init__(self, runtime: Runtime, name: str, identity: Identity, state: Any, params: Any) -> None:
        self._runtime, self._name, self._identity = runtime, name, identity
        self._state, self._params, self._plain = state, params, getattr(state, _OWN)
        self._epoch = runtime.epoch
        self.emitted: list[int] | None = None
        self.cost = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the method; with the last output, the choice is handed over."""
        output = self._plain(*args, **kwargs)
        if output.finish_reason is not None:
            self.end(output.finish_reason)
        return output

    def end(self, reason: str) -> None:
        """Hand the choice over. Never raises."""
        begun = thread_time()
        try:
            state, runtime = self._state, self._runtime
            own = vars(state)
            if self.emitted is not None:
                own.pop(_STEP, None)
            if own.pop(_OWN, None) is None:  # once a choice, from whatever thread; and the cycle is open again
                return
            self._plain = None
            hook = runtime.hook
            if hook is None:
                return
            if not runtime.capturing:  # switched off meanwhile
                hook.refuse("switched_off")
                return
            self._end, self._drafter = reason, runtime.served.version
            self._epoch -= runtime.epoch  # 0: one drafter from the start to the end
            self._num_outputs = num_outputs = len(state.detokenizer.output_token_ids)
            size = _STATE_BYTES + _TOKEN_BYTES * (len(state.prompt_token_ids) + 2 * num_outputs)
            if self._params.logprobs is not None:
                size += _LOGPROB_BYTES * num_outputs * (1 + max(0, self._params.logprobs))
            identity = self._identity
            hook.offer_later(identity.tenant, self._name, identity.asserted, size, self._finished)
            runtime.timing.add(self.cost + thread_time() - begun)
        except Exception:  # noqa: BLE001  outermost guard: capture never fails a request
            _count_fault()

    def _finished(self) -> FinishedRequest:
        """What the hook keeps. Raises ValueError: the state has changed since."""
        params, identity, state = self._params, self._identity, self._state
        output_ids = state.detokenizer.output_token_ids
        if len(output_ids) != self._num_outputs:
            raise ValueError("the engine went on with a finished choice")
        accepted, drafted = self._steps()
        logprobs = state.logprobs_processor.logprobs if self._runtime.takes_logprobs else None
        return FinishedRequest(
            request_id=_plain_name(self._name),
            conversation_id=identity.conversation or _hashed(self._name),
            tenant=identity.tenant,
            subject=identity.subject,
            prompt_ids=state.prompt_token_ids,
            output_ids=output_ids,
            finish_reason=_ENDS.get(self._end, "abort"),
            sampling=Sampling(
                temperature=float(params.temperature),
                top_p=float(params.top_p),
                top_k=max(0, params.top_k),
                max_tokens=params.max_tokens or 0,
                seed=params.seed,
            ),
            logprobs=sampled_logprobs(logprobs, output_ids),
            accepted=accepted,
            drafted=drafted,
            drafter_version=self._drafter,
            slices=self._slices(),
            choice=state.request_index,
            asserted=identity.asserted,
        )

    def _steps(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Accepted and drafted of each step."""
        metrics = self._state.spec_decode_metrics
        if self.emitted:
            accepted = tuple(count - 1 for count in self.emitted[1:])
            told = () if metrics is None else tuple(metrics.per_step_drafted)
            return accepted, told if len(told) == len(accepted) else ()
        if metrics is None:
            return (), ()
        return fitted(metrics.per_step_accepted, metrics.per_step_drafted, self._num_outputs)

    def _slices(self) -> dict[str, str]:
        slices = dict(self._identity.slices)
        slices |= {
            "route": self._identity.route,
            "stream": "yes" if versions.is_delta(self._state.output_kind) else "no",
        }
        if self._epoch:
            slices["drafter"] = "changed"  # under way: acceptance is not of drafter_version alone
        weights = {label for label, _ in self._state.weight_version_starts} - {versions.DEFAULT_WEIGHTS}
        if weights:
            slices["weights"] = ",".join(sorted(weights))
        if versions.alters_logits(self._params):
            slices["logits"] = "altered"
        return slices


def _stepping(choice: _Choice, plain: Callable[..., Any]) -> Callable[..., Any]:
    """What each step gave, where vLLM's own counts do not say.

    The engine is told of a stop string, and tells no counts then; of steps whose drafts a grammar has thrown out it
    counts none.
    """
    emitted = choice.emitted = []

    @wraps(plain)
    def make_request_output(new_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if new_token_ids:
            emitted.append(len(new_token_ids))
        return plain(new_token_ids, *args, **kwargs)

    return make_request_output


def end_all(runtime: Runtime) -> None:
    """The engine or the process ends: what still runs is cut, and nobody tells its states. Never raises."""
    for processor in runtime.processors:
        for state in list(processor.request_states.values()):
            choice = vars(state).get(_OWN)
            if isinstance(choice, _Choice):
                choice.end("abort")


def _count_fault() -> None:
    current().fault()


def _plain_name(name: str) -> str:
    """vLLM's name of a request. A client may have chosen a part of it: what is no plain id becomes one."""
    return name if _PLAIN.fullmatch(name) else _hashed(name)


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def fitted(
    accepted: Sequence[int], drafted: Sequence[int], num_outputs: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per-step counts cut to what the user got: a stop or a length ends within the last step that vLLM counted.

    The first output token is prefill's; then each step gave its accepted tokens and one more. Where vLLM drafted
    nothing in a step it counts none, so the sum may be below num_outputs - 1 after the cut, never above.
    """
    kept, proposed = list(accepted), list(drafted)
    surplus = sum(kept) + len(kept) - max(0, num_outputs - 1)
    while surplus > 0 and kept:
        if surplus > kept[-1]:  # the whole step
            surplus -= kept.pop() + 1
            proposed.pop()
        else:
            kept[-1] -= surplus
            surplus = 0
    return tuple(kept), tuple(proposed)


def sampled_logprobs(logprobs: Any, output_ids: Sequence[int]) -> list[float] | None:
    """Of each output token, out of what vLLM has made for the client; None where it has not, or not for each."""
    if not logprobs or len(logprobs) != len(output_ids):
        return None
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:  # flat: a position's first one is the sampled token's
        return [logprobs.logprobs[start] for start in starts]
    found = [position.get(token) for position, token in zip(logprobs, output_ids, strict=True)]
    return None if None in found else [each.logprob for each in found]

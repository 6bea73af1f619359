"""The capture point: each choice of each request, from its start to its end.

vLLM makes one RequestState a choice, in the context of the HTTP request, and asks it for its last output once, however
it ends: stop, length, a client that left. Whether a choice may be kept is decided at its start, and only what may is
watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from time import perf_counter
from typing import Any

from draftloop.pipeline.records import FinishReason, Sampling
from draftloop.serving_hooks.finished import FinishedRequest, most_bytes
from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.counting import discount_internal, install_counting
from draftloop.serving_hooks.vllm.middleware import Identity, caller, is_internal
from draftloop.serving_hooks.vllm.runtime import Runtime, current

# What vLLM may say: an error of the engine's ends a request as an abort does, repetition as a stop of its own.
_ENDS: dict[str, FinishReason] = {"stop": "stop", "repetition": "stop", "length": "length"}
_SLICES_LETTERS = 1200  # a gateway may name eight, of 64 letters at most
_LOGPROB_BYTES = 600  # of the objects vLLM makes for a token's log-probabilities
_OWN, _STEP = "_new_completion_output", "make_request_output"


def install() -> None:
    """Watch vLLM's requests; once a process."""
    kind = versions.request_state()
    plain = kind.from_new_request.__func__
    if not hasattr(plain, "__wrapped__"):
        kind.from_new_request = classmethod(_beginning(plain))
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


def _begin(runtime: Runtime, state: Any, request: Any) -> None:
    if is_internal():
        discount_internal(runtime, state)
        return
    hook = runtime.hook
    if hook is None or not runtime.capturing or request.sampling_params is None:  # None: pooling, nothing is generated
        return
    begun = perf_counter()
    identity = caller()
    parent = state.parent_req
    name = state.request_id if parent is None else parent.request_id
    if hook.admits(identity.tenant, name, identity.asserted):
        unfit = _unfit(state, request)
        if unfit is not None:
            hook.refuse(unfit)
        else:
            choice = _Choice(name, identity, request.sampling_params, state)
            setattr(state, _OWN, _Ending(runtime, choice, state))
            if request.sampling_params.stop:
                setattr(state, _STEP, _stepping(choice, getattr(state, _STEP)))
            choice.cost = perf_counter() - begun
            return
    runtime.timing.add(perf_counter() - begun)


def _unfit(state: Any, request: Any) -> str | None:
    """Why a request is not the target answering its tokens, as the fingerprint means it."""
    if state.lora_request is not None:
        return "lora"
    if request.resumable:  # its prompt grows while it is answered
        return "streaming_input"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt_embeddings"
    if request.mm_features:
        return "multimodal"
    if versions.is_partial(request):
        return "beam_search"
    return None


class _Choice:
    """What a record needs of a choice; the rest of it comes when it ends."""

    __slots__ = (
        "accepted",
        "choice",
        "conversation",
        "cost",
        "drafted",
        "drafter",
        "emitted",
        "end",
        "identity",
        "logprobs",
        "name",
        "output_ids",
        "params",
        "prompt_ids",
        "stream",
        "weights",
    )

    def __init__(self, name: str, identity: Identity, params: Any, state: Any) -> None:
        self.name = name
        self.identity = identity
        self.params = params
        self.choice = state.request_index
        self.conversation = identity.conversation or state.external_req_id
        self.emitted: list[int] = []
        self.cost = 0.0

    def finish(self, state: Any, end: str, drafter: str | None, takes_logprobs: bool) -> int:
        """Take what is needed of the state, copied or complete; returns the memory it takes at most."""
        self.end = end
        self.drafter = drafter
        self.prompt_ids = tuple(state.prompt_token_ids)
        self.output_ids = tuple(state.detokenizer.output_token_ids)
        self.logprobs = state.logprobs_processor.logprobs if takes_logprobs else None  # None: nobody asked for them
        self.stream = state.output_kind
        self.weights = state.weight_version_starts
        metrics = state.spec_decode_metrics
        self.accepted = () if metrics is None else metrics.per_step_accepted
        self.drafted = () if metrics is None else metrics.per_step_drafted
        if metrics is None and len(self.emitted) > 1:
            self.accepted = [count - 1 for count in self.emitted[1:]]
        outputs = len(self.output_ids)
        letters = len(self.name) + len(self.conversation) + sum(map(len, self.identity[:2])) + _SLICES_LETTERS
        size = most_bytes(len(self.prompt_ids) + 2 * outputs, letters)
        if self.logprobs:
            size += _LOGPROB_BYTES * outputs * (1 + max(0, self.params.logprobs or 0))
        return size

    def request(self) -> FinishedRequest:
        """What the hook keeps."""
        params, identity = self.params, self.identity
        accepted, drafted = fitted(self.accepted, self.drafted, len(self.output_ids))
        return FinishedRequest(
            request_id=self.name,
            conversation_id=self.conversation,
            tenant=identity.tenant,
            subject=identity.subject,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            finish_reason=_ENDS.get(self.end, "abort"),
            sampling=Sampling(
                temperature=float(params.temperature),
                top_p=float(params.top_p),
                top_k=max(0, params.top_k),
                max_tokens=params.max_tokens or 0,
                seed=params.seed,
            ),
            logprobs=sampled_logprobs(self.logprobs, self.output_ids),
            accepted=accepted,
            drafted=drafted,
            drafter_version=self.drafter,
            slices=self._slices(),
            choice=self.choice,
            asserted=identity.asserted,
        )

    def _slices(self) -> dict[str, str]:
        slices = dict(self.identity.slices)
        slices |= {"route": self.identity.route, "stream": "yes" if versions.is_delta(self.stream) else "no"}
        weights = {label for label, _ in self.weights} - {versions.DEFAULT_WEIGHTS}
        if weights:
            slices["weights"] = ",".join(sorted(weights))
        if versions.alters_logits(self.params):
            slices["logits"] = "altered"
        return slices


def _stepping(choice: _Choice, plain: Callable[..., Any]) -> Callable[..., Any]:
    """What each step gave, of a request with stop strings: the engine is told of the stop, and tells no counts then."""

    @wraps(plain)
    def make_request_output(new_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if new_token_ids:
            choice.emitted.append(len(new_token_ids))
        return plain(new_token_ids, *args, **kwargs)

    return make_request_output


class _Ending:
    """Stands in for the state's own method until the choice has ended."""

    __slots__ = ("_choice", "_plain", "_runtime", "_state")

    def __init__(self, runtime: Runtime, choice: _Choice, state: Any) -> None:
        self._runtime, self._choice, self._state = runtime, choice, state
        self._plain = getattr(state, _OWN)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the method; with the last output, the choice is handed over."""
        output = self._plain(*args, **kwargs)
        if output.finish_reason is not None:
            self.end(output.finish_reason)
        return output

    def end(self, reason: str) -> None:
        """Hand the choice over. Never raises."""
        begun = perf_counter()
        try:
            state, runtime, choice = self._state, self._runtime, self._choice
            for name in (_OWN, _STEP):  # once a choice; and the cycle through the state is open again
                vars(state).pop(name, None)
            hook = runtime.hook
            if hook is None:
                return
            if not runtime.capturing:  # switched off meanwhile
                hook.refuse("switched_off")
                return
            size = choice.finish(state, reason, runtime.served.version, runtime.takes_logprobs)
            identity = choice.identity
            hook.offer_later(identity.tenant, choice.name, size, choice.request, asserted=identity.asserted)
            runtime.timing.add(choice.cost + perf_counter() - begun)
        except Exception:  # noqa: BLE001  outermost guard: capture never fails a request
            _count_fault()


def end_all(runtime: Runtime) -> None:
    """The process ends: what still runs is cut, and nobody tells its states."""
    for processor in runtime.processors:
        for state in list(processor.request_states.values()):
            ending = vars(state).get(_OWN)
            if isinstance(ending, _Ending):
                ending.end("abort")


def _count_fault() -> None:
    hook = current().hook
    if hook is not None:
        hook.refuse("unexpected")


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

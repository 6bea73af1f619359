"""Speculation counters of traffic, exact at every step of the engine.

vLLM's own statistics of a step are nearly what is wanted. What they count beside it is rare and is taken off here:
tokens past a stop string, outputs without a token, and the plug-in's own requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from draftloop.pipeline.records import SpecCounters
from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.runtime import Discount, Runtime, current


def install_counting() -> None:
    """Notice what vLLM's statistics count too much; once a process."""
    kind = versions.output_processor()
    if not hasattr(kind.process_outputs, "__wrapped__"):
        kind.__init__ = _registering(kind.__init__)
        kind.process_outputs = _noticing(kind.process_outputs)
        kind._trim_surplus_tokens = staticmethod(_trimming(kind._trim_surplus_tokens))


def count_step(runtime: Runtime, scheduler_stats: Any, iteration_stats: Any) -> None:
    """Add vLLM's statistics of one step, less the discount that has gathered."""
    discount, runtime.discount = runtime.discount, Discount()
    known = runtime.counters
    drafts = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
    steps = emitted = 0
    if iteration_stats is not None:
        steps = len(iteration_stats.inter_token_latencies_iter)
        emitted = iteration_stats.num_generation_tokens - len(iteration_stats.time_to_first_tokens_iter)
    runtime.counters = SpecCounters(
        known.num_steps + steps - discount.num_steps,
        known.num_emitted + emitted - discount.num_emitted,
        known.num_drafted + (drafts.num_draft_tokens if drafts else 0) - discount.num_drafted,
        known.num_accepted + (drafts.num_accepted_tokens if drafts else 0) - discount.num_accepted,
    )


def discount_internal(runtime: Runtime, state: Any) -> None:
    """Keep a request of our own out of the counters: its tokens as they come, its drafts when it ends."""
    plain = state.make_request_output
    prefilled = False

    @wraps(plain)
    def make_request_output(new_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal prefilled
        try:
            if new_token_ids and prefilled:
                runtime.discount.num_steps += 1
                runtime.discount.num_emitted += len(new_token_ids)
            prefilled = prefilled or bool(new_token_ids)
            metrics = state.spec_decode_metrics  # comes with the last output
            if metrics is not None:
                del state.make_request_output
                runtime.discount.num_drafted += metrics.num_draft_tokens
                runtime.discount.num_accepted += sum(count * index for index, count in enumerate(metrics.histogram))
        except Exception:  # noqa: BLE001  outermost guard: what raises here would end every request
            runtime.fault()
        return plain(new_token_ids, *args, **kwargs)

    state.make_request_output = make_request_output


def _registering(plain: Callable[..., None]) -> Callable[..., None]:
    """An API server has one, with the states of all that runs."""

    @wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        current().processors.append(self)

    return init


def _noticing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            for output in engine_core_outputs:
                if not output.new_token_ids:
                    _notice_empty(self.request_states.get(output.request_id))
        except Exception:  # noqa: BLE001  outermost guard: what raises here would end every request
            current().fault()
        return plain(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _notice_empty(state: Any) -> None:
    """An output without a token, as of a request that the engine aborts: counted as a step, or as a first token."""
    if state is None:  # vLLM counts nothing for it
        return
    discount = current().discount
    if state.is_prefilling:
        discount.num_emitted -= 1
    else:
        discount.num_steps += 1


def _trimming(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def trim(req_state: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = output.new_token_ids  # cut in place
        before = len(tokens)
        result = plain(req_state, output, *args, **kwargs)
        current().discount.num_emitted += before - len(tokens)
        return result

    return trim

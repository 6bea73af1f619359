"""Which vLLM releases are supported, and every name of vLLM's that differs between them: the one place to touch."""

from __future__ import annotations

import uuid
from typing import Any

from draftloop.pipeline.errors import EngineUnsupportedError

SUPPORTED = ("0.32",)  # releases whose calls the tests of tests/engine have seen working
DEFAULT_WEIGHTS = "default"  # the label of target weights that nobody has updated


def release() -> str:
    """The release that runs in this process."""
    import vllm

    return str(vllm.__version__)


def require_supported(found: str) -> None:
    """Raises EngineUnsupportedError for a release that nobody has tried the plug-in with."""
    if not any(found == known or found.startswith(f"{known}.") for known in SUPPORTED):
        raise EngineUnsupportedError(
            f"vLLM {found}: this draftloop knows {', '.join(f'{known}.x' for known in SUPPORTED)}",
            mend="install a release of draftloop that lists yours; until then serving goes on without capture and swap",
        )


def request_state() -> Any:
    """One choice of one request in the API server. `from_new_request` makes it in its caller's context."""
    from vllm.v1.engine.output_processor import RequestState

    return RequestState


def output_processor() -> Any:
    """Turns the engine's outputs into requests'. Its static `_trim_surplus_tokens` cuts what is past a stop string."""
    from vllm.v1.engine.output_processor import OutputProcessor

    return OutputProcessor


def is_delta(output_kind: Any) -> bool:
    """Whether a request of that RequestOutputKind is streamed."""
    return bool(output_kind.name == "DELTA")


def is_beam(request: Any) -> bool:
    """Whether an EngineCoreRequest is one token of a beam search: vLLM runs each as a request, named `...-beam-<i>`."""
    head, beam, index = (request.external_req_id or "").rpartition("-beam-")
    return bool(head and beam and index.isdecimal() and request.sampling_params.max_tokens == 1)


def tells_logprobs(vllm_config: Any) -> bool:
    """Whether what clients get as log-probabilities are such; vLLM can be told to give logits in their place."""
    return str(vllm_config.model_config.logprobs_mode).endswith("logprobs")


def alters_logits(params: Any) -> bool:
    """Whether SamplingParams sample from something else than the target's own distribution, temperature aside."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.min_p
        or params.min_tokens
        or params.structured_outputs is not None
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.trace_decode_token_ids
        or params.thinking_token_budget is not None
    )


def metrics_route() -> Any:
    """The module that mounts /metrics, after the engine is built, on what its `get_prometheus_registry()` returns."""
    from vllm.entrypoints.serve.instrumentator import metrics

    return metrics


def stat_logger_base() -> Any:
    """What a stat logger inherits from."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    return StatLoggerBase


def transfer_factory() -> Any:
    """Knows the weight transports by name, in its `_registry`."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    return WeightTransferEngineFactory


def worker_base() -> Any:
    """What every worker class inherits from."""
    from vllm.v1.worker.worker_base import WorkerBase

    return WorkerBase


def layerwise() -> Any:
    """Reloading layer by layer. `_place_kernel_tensors(layer, info)` undoes what a session has begun with a layer."""
    from vllm.model_executor.model_loader.reload import layerwise as module

    return module


def dflash() -> tuple[Any, Any, Any]:
    """The DFlash drafter, its inner model (`_build_fused_kv_buffers` derives tensors) and linear layers' base."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

    return DFlashQwen3ForCausalLM, DFlashQwen3Model, LinearBase


def end_session(worker: Any) -> None:
    """vLLM leaves a session of weights open when its finish fails, and then refuses every later one."""
    worker._weight_update_active = False
    worker.weight_transfer_engine.reset_weight_update_target()


def async_llm() -> Any:
    """The engine as the API server sees it."""
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM


def update_request(update_info: dict[str, Any]) -> Any:
    """What `AsyncLLM.update_weights` takes."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=update_info)


def sampling(**parameters: Any) -> Any:
    """Sampling parameters of a request whose answer is wanted whole, at its end."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **parameters)


def request_id() -> str:
    """A name no other request has."""
    return f"draftloop-{uuid.uuid4().hex}"


def client_error() -> type[Exception]:
    """What vLLM raises for a request that it cannot run."""
    from vllm.exceptions import VLLMClientError

    kind: type[Exception] = VLLMClientError
    return kind


def missing(error: Exception) -> EngineUnsupportedError:
    """What it means when a name of vLLM's is not where this file says."""
    return EngineUnsupportedError(
        f"vLLM {release()} is not as expected: {type(error).__name__}: {error}",
        mend="another package may have replaced parts of vLLM; install the release as published",
    )

"""Which vLLM releases are supported, and every name of vLLM's that differs between them: the one place to touch."""

from __future__ import annotations

from typing import Any

from draftloop.pipeline.errors import EngineUnsupportedError

SUPPORTED = ("0.32",)  # releases whose calls the tests of tests/engine have seen working


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
    """Turns the engine's outputs into a request's. Its static `_trim_surplus_tokens` cuts what is past a stop string."""
    from vllm.v1.engine.output_processor import OutputProcessor

    return OutputProcessor


def missing(error: Exception) -> EngineUnsupportedError:
    """What it means when a name of vLLM's is not where this file says."""
    return EngineUnsupportedError(
        f"vLLM {release()} is not as expected: {type(error).__name__}: {error}",
        mend="another package may have replaced parts of vLLM; install the release as published",
    )

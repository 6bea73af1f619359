"""The general plug-in: vLLM calls `register` in each of its processes, before it builds an engine."""

from __future__ import annotations

import logging
import multiprocessing

from draftloop.pipeline.errors import DraftloopError
from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.runtime import Runtime, current
from draftloop.serving_hooks.vllm.settings import is_named

_log = logging.getLogger("draftloop.serving")


def register() -> None:
    """Put our parts into this process, once. Never raises: what is wrong is kept in the runtime and logged."""
    runtime = current()
    try:
        versions.require_supported(versions.release())
        if is_named():
            _install()
    except DraftloopError as error:
        runtime.trouble = error
    except Exception as error:  # noqa: BLE001  outermost guard: a private name of vLLM's may be gone, serving goes on
        runtime.trouble = versions.missing(error)
    _tell(runtime)


def _install() -> None:
    # Late: these import vLLM, torch even; this file is read wherever vLLM looks for plug-ins.
    from draftloop.serving_hooks.vllm import dflash, requests, transport, wake, worker

    for part in (transport, worker, dflash, wake, requests):
        part.install()


def _tell(runtime: Runtime) -> None:
    if runtime.trouble is not None and multiprocessing.parent_process() is None:
        _log.warning("draftloop does nothing in this server: %s", runtime.trouble)

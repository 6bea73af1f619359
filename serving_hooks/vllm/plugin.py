"""The general plug-in: vLLM calls `register` in each of its processes, before it builds an engine."""

from __future__ import annotations

import logging
import multiprocessing

from draftloop.pipeline.errors import DraftloopError
from draftloop.serving_hooks.vllm import versions
from draftloop.serving_hooks.vllm.runtime import Runtime, current
from draftloop.serving_hooks.vllm.settings import is_named

_log = logging.getLogger("vllm.draftloop")  # only what is below its name does vLLM show


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
    if runtime.trouble is not None and is_named():
        _keep_the_flag_known()
    _tell(runtime)


def _keep_the_flag_known() -> None:
    """A server told to use our transport must start although nothing else of ours is in it."""
    try:
        from draftloop.serving_hooks.vllm import transport

        transport.install()
    except Exception as error:  # noqa: BLE001  outermost guard: the trouble is told already
        _log.warning("draftloop: --weight-transfer-config draft_disk is not known here: %s", error)


def _install() -> None:
    # Late: these import vLLM, torch even; this file is read wherever vLLM looks for plug-ins.
    from draftloop.serving_hooks.vllm import dflash, requests, transport, wake, worker

    for part in (transport, worker, dflash, wake, requests):
        part.install()


def _tell(runtime: Runtime) -> None:
    if runtime.trouble is not None and multiprocessing.parent_process() is None:
        _log.warning("draftloop does nothing in this server: %s", runtime.trouble)

"""The embedded engine: continuous batching in a worker thread, with the capture and swap calls of the real engines.

The target verifies every token itself, so a drafter can change how many steps a text takes and never which text.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch

from draftloop.pipeline.errors import (
    CheckpointError,
    EngineError,
    InputError,
    SwapFailedError,
    SwapRefusedError,
)
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.records import Condition, ProbeResult, Sampling, SpecCounters, Swapped
from draftloop.serving_hooks.capture import CaptureHook, FinishedRequest
from draftloop.serving_hooks.embedded.core import BatchCore
from draftloop.serving_hooks.embedded.running import Running
from draftloop.serving_hooks.embedded.types import Completion, EngineConfig, Request
from draftloop.trainers.checkpoint import open_drafter, tensor_digest
from draftloop.trainers.eagle3 import Eagle3, Eagle3Config
from draftloop.trainers.target import Target

__all__ = ["Completion", "EmbeddedEngine", "EngineConfig", "Request"]


class EmbeddedEngine:
    """Serves one target on this machine; implements EngineClient. Use as a context manager, or start() and stop()."""

    def __init__(self, target: Target, config: EngineConfig, capture: CaptureHook | None = None) -> None:
        self._target = target
        self._config = config
        self._capture = capture
        self._core = BatchCore(target, config, self._finished)
        self._changed = threading.Condition()  # guards everything below, and the core between two steps
        self._thread: threading.Thread | None = None
        self._swapping = threading.Lock()  # held while weights change: resume() waits for it
        self._paused = False
        self._stepping = False
        self._stopping = False
        self._failure: BaseException | None = None
        self._live: dict[str, Running] = {}
        self._num_probes = 0
        self._boot_id = f"{time.time_ns():x}"
        self._shape: Eagle3Config | None = None  # of the first drafter; fixed from then on

    def __enter__(self) -> EmbeddedEngine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the worker thread; a running one is left alone."""
        with self._changed:
            if self._thread is None:
                self._stopping = False
                self._thread = threading.Thread(target=self._work, name="embedded-engine", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop between two steps. Unfinished requests complete as aborted, with the tokens they have."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._stopping = True
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def submit(self, request: Request) -> Future[Completion]:
        """Queue a request. Raises InputError (does not fit, id in use), EngineError (not running)."""
        return self._enqueue([self._accept(request)])[0]

    def generate(
        self, requests: Sequence[Request], on_done: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Run requests to their end, in order; on_done is called in the caller's thread as each one finishes.

        The same requests on an otherwise idle engine give the same outputs in the same order of finishing.
        """
        futures = self._enqueue([self._accept(request) for request in requests])
        ended: SimpleQueue[Future[Completion]] = SimpleQueue()
        for future in futures:
            future.add_done_callback(ended.put)
        for _ in futures:
            completion = ended.get().result()
            if on_done is not None:
                on_done(completion)
        return [future.result() for future in futures]

    def cancel(self, request_id: str) -> None:
        """End a request with the tokens it has (finish_reason "abort"); an unknown or finished id is no error."""
        with self._changed:
            if request_id in self._live:
                self._live[request_id].cancelled = True

    def fingerprint(self) -> Fingerprint:
        return self._target.fingerprint

    def drafter_version(self) -> str | None:
        return self._core.drafter_version

    def condition(self) -> Condition:
        return Condition(self._boot_id, self._core.drafter_version)

    def counters(self) -> SpecCounters:
        """Speculation since the start; probes are not counted."""
        return self._core.counters

    def pause(self) -> None:
        """Return once the worker stands between two steps; running requests keep their state."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._stepping)

    def resume(self) -> None:
        with self._swapping, self._changed:
            self._paused = False
            self._changed.notify_all()

    def load_drafter(self, folder: Path | None, version: str | None) -> str:
        """Put another drafter into place (None: none) and return the digest of its tensors ("" for none).

        Running requests keep their features, from which the new drafter's cache is rebuilt. Whatever is raised, the
        previous drafter still serves: SwapRefusedError (not paused, or another shape than the first drafter's),
        CheckpointError, FingerprintMismatchError, SwapFailedError.
        """
        with self._swapping:
            with self._changed:
                if not self._paused or self._stepping:
                    raise SwapRefusedError(f"drafter {version!r} while the engine runs", mend="call pause() first")
            if folder is None:
                self._core.drafter, self._core.drafter_version = None, None
                return ""
            opened = open_drafter(folder, fingerprint=self._target.fingerprint, dtype=self._core.dtype)
            model = opened.model.to(self._core.taps.device)
            self._check_drafter(model, folder)
            digest = tensor_digest(model)
            try:
                runner = self._core.make_runner(model)
            except RuntimeError as error:
                raise SwapFailedError(
                    f"drafter {folder} did not run: {error}; {self._core.drafter_version!r} still serves"
                ) from error
            self._core.drafter, self._core.drafter_version = runner, version
            self._shape = model.config
            return digest

    def swap(self, folder: Path | None, version: str | None) -> Swapped:
        """Pause, load_drafter, resume whatever happens. Raises what load_drafter raises."""
        start = time.perf_counter()
        try:
            self.pause()
            tensors = self.load_drafter(folder, version)
        finally:
            self.resume()
        return Swapped(tensors, (time.perf_counter() - start) * 1000)

    def probe(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> ProbeResult:
        """Greedy outputs through the normal path, ahead of the queue, not captured and not in counters().

        Raises EngineError while paused, InputError for a prompt that does not fit.
        """
        with self._changed:
            if self._paused:
                raise EngineError("probe while the engine is paused would wait for ever", mend="call resume() first")
            start = self._num_probes
            self._num_probes += len(prompts)
        sampling = Sampling(max_tokens=max_tokens)
        states = [
            self._accept(Request(f"probe-{start + index}", tuple(prompt), sampling), probing=True)
            for index, prompt in enumerate(prompts)
        ]
        done = [future.result() for future in self._enqueue(states)]
        num_accepted = sum(sum(each.accepted) for each in done)
        num_steps = sum(len(each.accepted) for each in done)
        return ProbeResult(
            tuple(each.output_ids for each in done),
            tuple(tuple(state.margins) for state in states),
            SpecCounters(num_steps, num_steps + num_accepted, sum(sum(each.drafted) for each in done), num_accepted),
        )

    def _accept(self, request: Request, *, probing: bool = False) -> Running:
        room = self._config.max_sequence - len(request.prompt_ids)
        if not request.prompt_ids or room < 1:
            raise InputError(
                f"request {request.request_id}: prompt of {len(request.prompt_ids)} tokens "
                f"(engine.max_sequence = {self._config.max_sequence})",
                mend=f"give 1 to {self._config.max_sequence - 1} prompt tokens or raise engine.max_sequence",
            )
        rows = self._target.fingerprint.padded_vocab_size
        wrong_type = set(map(type, request.prompt_ids)) - {int}  # one float would fail the step of everybody
        if wrong_type or min(request.prompt_ids) < 0 or max(request.prompt_ids) >= rows:
            raise InputError(
                f"request {request.request_id}: token id outside 0..{rows - 1}, or no integer",
                mend="use this target's tokenizer",
            )
        if not _can_sample(request.sampling):
            raise InputError(
                f"request {request.request_id}: {request.sampling}",
                mend="temperature is finite and >= 0, top_p in (0, 1]; top_k and max_tokens are integers >= 0",
            )
        return Running(request, min(request.sampling.max_tokens or room, room), Future(), probing)

    def _enqueue(self, states: Sequence[Running]) -> list[Future[Completion]]:
        """Queue all at once, so that what is batched together does not depend on the worker's timing."""
        with self._changed:
            if self._failure is not None or self._thread is None:
                raise EngineError(
                    f"the embedded engine is not running{f': {self._failure}' if self._failure else ''}",
                    mend="call start() first" if self._failure is None else "build a new engine",
                )
            ids = [state.request.request_id for state in states]
            taken = [name for name in ids if name in self._live]
            if taken or len(set(ids)) < len(ids):
                raise InputError(f"request id {(taken or ids)[0]!r} is in use", mend="give each request its own id")
            self._live.update(zip(ids, states, strict=True))
            for state in states:
                state.future.set_running_or_notify_cancel()  # cancel(request_id) is the way, it keeps the tokens
            if states and states[0].probing:
                self._core.waiting.extendleft(reversed(states))
            else:
                self._core.waiting.extend(states)
            self._changed.notify_all()
        return [state.future for state in states]

    def _work(self) -> None:
        try:
            while self._next_step():
                self._core.step()
        except Exception as error:  # noqa: BLE001  outermost guard: waiting callers must learn of it
            self._failure = error
        finally:
            self._drain()

    def _next_step(self) -> bool:
        """Wait until there is something to do; False to end."""
        with self._changed:
            self._stepping = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopping or (not self._paused and self._core.has_work()))
            self._stepping = not self._stopping
            return self._stepping

    def _drain(self) -> None:
        """Answer everybody who still waits: aborted after stop(), an error after a failure."""
        with self._changed:
            self._stepping = False
            if self._failure is None:
                self._core.abort_all()
            for state in list(self._live.values()):
                state.future.set_exception(EngineError(f"the embedded engine failed: {self._failure!r}"))
            self._live.clear()
            self._changed.notify_all()

    def _finished(self, state: Running) -> None:
        """Worker thread: capture, then answer."""
        completion = state.completion()
        with self._changed:
            self._live.pop(state.request.request_id, None)
        if self._capture is not None and not state.probing:
            self._capture.offer(_finished_request(state.request, completion))
        state.future.set_result(completion)

    def _check_drafter(self, model: Eagle3, folder: Path) -> None:
        fingerprint, config = self._target.fingerprint, model.config
        wanted = (fingerprint.hidden_size, fingerprint.padded_vocab_size, len(fingerprint.tap_layers))
        found = (config.hidden_size, config.vocab_size, config.num_taps)
        if wanted != found:
            raise CheckpointError(
                f"drafter {folder}: hidden size, vocabulary and taps are {found}, the target's are {wanted}",
                mend="train the drafter for this target",
            )
        if self._shape is not None and config != self._shape:
            old, new = self._shape.model_dump(), config.model_dump()
            odd = ", ".join(f"{key} {old[key]} -> {new[key]}" for key in old if old[key] != new[key])
            raise SwapRefusedError(
                f"drafter {folder} has another shape than the live one ({odd})",
                mend="train with the live drafter's shape, or restart the engine",
            )
        for name, value in model.named_parameters():
            if not bool(torch.isfinite(value).all()):
                raise CheckpointError(f"drafter {folder}: {name} holds NaN or infinity", mend="train it again")


def _finished_request(request: Request, completion: Completion) -> FinishedRequest:
    return FinishedRequest(
        request_id=request.request_id,
        conversation_id=request.conversation_id or request.request_id,
        tenant=request.tenant,
        subject=request.subject,
        prompt_ids=completion.prompt_ids,
        output_ids=completion.output_ids,
        finish_reason=completion.finish_reason,
        sampling=request.sampling,
        logprobs=completion.logprobs,
        accepted=completion.accepted,
        drafted=completion.drafted,
        drafter_version=completion.drafter_version,
        slices=request.slices,
    )


def _can_sample(sampling: Sampling) -> bool:
    """Whether these settings can be computed with: what cannot would fail the step of every running request."""
    counts = (sampling.top_k, sampling.max_tokens, abs(sampling.seed or 0))
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        return False
    return 0 <= sampling.temperature < math.inf and 0 < sampling.top_p <= 1

"""One swap at a time in a running engine: check, read, pause, load, look, resume, prove; undo while still paused.

Whatever happens the engine is resumed, and a caller that goes away in the middle changes nothing: the swap runs to its
end by itself. From the pause to the proof nobody else pauses, resumes, wakes or puts to sleep (wake.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from draftloop.pipeline.errors import (
    CheckpointError,
    DraftloopError,
    ReplicaLostError,
    SwapBusyError,
    SwapFailedError,
    SwapRefusedError,
)
from draftloop.pipeline.signature import load_public_key
from draftloop.serving_hooks.vllm import checks, versions
from draftloop.serving_hooks.vllm.checks import Boot, Checked, Rules
from draftloop.serving_hooks.vllm.runtime import Runtime, Served

READ_TIMEOUT_S = 600.0  # the file is checked, or read and hashed by the workers; requests run meanwhile
STEP_TIMEOUT_S = 60.0  # each call inside the pause
POLL_S = 0.02
_log = logging.getLogger("vllm.draftloop")  # only what is below its name does vLLM show
_T = TypeVar("_T")
_ours: ContextVar[bool] = ContextVar("draftloop_swapping", default=False)  # whether a call to the engine is a swap's
_RESTART = "restart this replica: it comes back with the drafter of its agent's folder"


@dataclass(frozen=True)
class Swapped:
    """A drafter got in and was proven."""

    version: str
    digest: str
    tensors: str
    pause_ms: float  # requests stood still
    swap_ms: float  # from the call to the proof


class Swapper:
    """Owns the drafter of one engine."""

    def __init__(self, engine: Any, runtime: Runtime) -> None:
        self._engine = engine
        self._runtime = runtime
        self._boot: Boot | None = None
        self._refusal: DraftloopError | None = None  # why no swap is possible in this process
        self._ready: asyncio.Task[None] | None = None
        self._running: asyncio.Task[Swapped] | None = None
        self._lock = asyncio.Lock()
        self._settled = asyncio.Event()  # clear while the drafter is being replaced
        self._settled.set()
        self._pausing = 0  # outside callers in the middle of a pause

    @property
    def lock(self) -> asyncio.Lock:
        """Held while a swap touches the engine, and by what must not meet that."""
        return self._lock

    @property
    def swapping(self) -> bool:
        """Whether a swap is under way."""
        return self._running is not None

    @property
    def refusal(self) -> DraftloopError | None:
        """Why no swap is possible in this process."""
        return self._refusal

    # The drafter the engine was started with.

    def start(self, unsupported: DraftloopError | None) -> None:
        """Get to know the drafter the engine was started with, while requests run already."""
        self._refusal = unsupported
        if unsupported is None:
            self._ready = asyncio.create_task(self._meet())

    async def known(self) -> None:
        """Until it is known, or known that it cannot be: before that the engine must not sleep."""
        if self._ready is not None:
            await asyncio.wait([self._ready])  # neither cancels it nor raises what it raised

    async def _meet(self) -> None:
        try:
            if await self._timely(self._engine.is_sleeping(), "is_sleeping"):
                raise SwapRefusedError("the engine slept before its drafter was known", mend=_RESTART)
            folder = Path(self._engine.vllm_config.speculative_config.draft_model_config.model).resolve()
            boot = await asyncio.to_thread(checks.read_boot, folder)
            await self._read(folder / checks.WEIGHTS, boot.manifest.files[checks.WEIGHTS], boot.manifest.tensor_digest)
            await self._prove("staged")
            await self._call("draftloop_adopt")
            self._boot = boot
            self._runtime.serve(folder.name, boot.digest, boot.manifest.tensor_digest)
        except DraftloopError as error:
            self._refuse(error)
        except Exception as error:  # noqa: BLE001  outermost guard of a background task: serving goes on without swaps
            self._refuse(versions.missing(error))

    def _refuse(self, error: DraftloopError) -> None:
        self._refusal = error
        _log.warning("draftloop cannot swap drafters in this server: %s", error)

    # Swaps.

    async def swap(self, version: str, digest: str) -> Swapped:
        """Bring a staged version into the engine. Goes on to its end if the caller is cancelled.

        Raises SwapBusyError; InputError, CheckpointError, FingerprintMismatchError, SwapRefusedError where nothing was
        touched; SwapFailedError where the previous drafter serves again; ReplicaLostError.
        """
        if self._running is not None or self._lock.locked():
            raise SwapBusyError("another swap is under way", mend="wait for it to end")
        self._running = asyncio.create_task(self._swap(version, digest))
        self._running.add_done_callback(self._ended)
        return await asyncio.shield(self._running)

    def _ended(self, task: asyncio.Task[Swapped]) -> None:
        self._running = None
        if task.cancelled():
            result = "cancelled"
        elif (error := task.exception()) is None:
            result = "done"
        else:
            refused = isinstance(error, DraftloopError) and not isinstance(error, SwapFailedError)
            result = "refused" if refused else "failed"
        self._runtime.count_swap(result)

    async def _swap(self, version: str, digest: str) -> Swapped:
        began = time.monotonic()
        boot = await self._require_ready()
        checked = await self._check(version, digest, boot)
        await self._read(checked.weights, checked.sha256, checked.tensors)
        async with self._lock:
            with self._touching():  # first: a pause that comes while we ask whether there is one waits
                await self._require_running()
                pause_ms = await self._exchange(checked)
        return Swapped(version, digest, checked.tensors, pause_ms, (time.monotonic() - began) * 1e3)

    async def _require_ready(self) -> Boot:
        await self.known()
        for problem in (self._runtime.trouble, self._refusal):
            if problem is not None:
                raise problem
        if self._runtime.restart_needed is not None:
            raise ReplicaLostError(self._runtime.restart_needed, mend=_RESTART)
        assert self._boot is not None
        return self._boot

    async def _require_running(self) -> None:
        if (
            self._pausing
            or await self._timely(self._engine.is_paused(), "is_paused")
            or await self._timely(self._engine.is_sleeping(), "is_sleeping")
        ):
            raise SwapBusyError("the engine is paused by somebody else, or sleeps", mend="resume it first")

    async def _check(self, version: str, digest: str, boot: Boot) -> Checked:
        checking = asyncio.to_thread(checks.check_version, version, digest, boot, self._rules())
        try:
            return await asyncio.wait_for(checking, READ_TIMEOUT_S)
        except TimeoutError:
            raise SwapRefusedError(
                f"version {version} could not be read within {READ_TIMEOUT_S:.0f} s", mend="look at the disk it lies on"
            ) from None

    # Others who pause, resume, wake or put to sleep.

    @contextmanager
    def _touching(self) -> Iterator[None]:
        """The drafter is being replaced."""
        self._settled.clear()
        token = _ours.set(True)
        try:
            yield
        finally:
            _ours.reset(token)
            self._settled.set()

    async def settled(self) -> None:
        """Until no drafter is being replaced; a swap's own calls do not wait.

        Not the lock: who resumes must not wait for one who waits, with the lock, for a paused engine's requests.
        """
        while not (_ours.get() or self._settled.is_set()):
            await self._settled.wait()

    @asynccontextmanager
    async def outside_pause(self) -> AsyncIterator[None]:
        """A pause that somebody else asks for: it waits for a swap to end, and none begins in the middle of it."""
        await self.settled()
        if _ours.get():
            yield
            return
        self._pausing += 1
        try:
            yield
        finally:
            self._pausing -= 1

    def _rules(self) -> Rules:
        settings, fingerprint = self._runtime.settings, self._runtime.fingerprint
        assert settings is not None
        assert fingerprint is not None
        if settings.swap.staging is None:
            raise SwapRefusedError("no staging folder is set", mend="set swap.staging to the agent's drafters folder")
        key = settings.swap.public_key
        return Rules(
            staging=settings.swap.staging,
            fingerprint=fingerprint,
            max_bytes=settings.swap.max_drafter_bytes,
            public_key=None if key is None else load_public_key(key),
        )

    async def _read(self, path: Path, sha256: str, tensors: str) -> None:
        """Have each worker read the file into its memory, and compare what they found."""
        if not all(await self._call("draftloop_stage", str(path), sha256)):
            raise SwapBusyError("the last file is still being read", mend="look at the disk it lies on, then try again")
        deadline = time.monotonic() + READ_TIMEOUT_S
        while None in (found := await self._call("draftloop_staged")):
            if time.monotonic() > deadline:
                raise SwapRefusedError(f"a worker still reads {path}", mend="look at the disk it lies on")
            await asyncio.sleep(POLL_S)
        for worker in found:
            if worker["error"] is not None:
                raise CheckpointError(worker["error"], mend=worker["mend"])
            if worker["digest"] != tensors:
                raise CheckpointError(
                    f"{path} holds tensors {worker['digest']}, its manifest names {tensors}",
                    mend="stage the version again; nothing was changed",
                )

    async def _exchange(self, checked: Checked) -> float:
        """Replace, prove and keep. Returns how long requests stood still, milliseconds."""
        try:
            pause_ms = await self._replace(checked)
            try:
                await self._call("draftloop_adopt")
            except DraftloopError as error:
                raise self._lost(f"version {checked.version} serves, but not for good: {error.message}") from error
            return pause_ms
        except DraftloopError:
            raise
        except Exception as error:  # outermost guard of what touches the engine: nobody knows what serves
            self._runtime.serve(None, None, None)
            raise self._lost(f"version {checked.version} failed: {type(error).__name__}: {error}") from error

    async def _replace(self, checked: Checked) -> float:
        """Returns how long requests stood still, milliseconds."""
        before = self._runtime.served
        began = time.monotonic()
        async with self._paused():
            try:
                await self.load("staged")
            except DraftloopError as error:
                raise await self._undo(checked.version, error, before) from error
            self._runtime.serve(checked.version, checked.digest, checked.tensors)
        pause_ms = (time.monotonic() - began) * 1e3
        try:
            await self._prove("staged")
        except DraftloopError as error:
            raise await self._undo_paused(checked.version, error, before) from error
        return pause_ms

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        try:
            await self._timely(self._engine.pause_generation(mode="keep", clear_cache=False), "pause")
            yield
        finally:
            await self._resume()

    async def _undo_paused(self, version: str, failure: DraftloopError, before: Served) -> SwapFailedError:
        try:
            async with self._paused():
                return await self._undo(version, failure, before)
        except ReplicaLostError:
            raise
        except DraftloopError as error:  # of the pause: the drafter that failed its proof still serves
            return self._not_undone(version, failure, before, error)

    async def _undo(self, version: str, failure: DraftloopError, before: Served) -> SwapFailedError:
        """Bring the previous drafter back. Returns what to raise."""
        try:
            await self._call("draftloop_abort")
            await self.load("serving")
        except DraftloopError as error:
            return self._not_undone(version, failure, before, error)
        self._runtime.served = before
        return SwapFailedError(
            f"version {version} failed: {failure.message}; {before.version} serves again", mend="see the engine's log"
        )

    def _not_undone(
        self, version: str, failure: DraftloopError, before: Served, why: DraftloopError
    ) -> SwapFailedError:
        self._runtime.serve(None, None, None)
        return self._lost(
            f"version {version} failed ({failure.message}) and {before.version} could not be brought back "
            f"({why.message})"
        )

    def _lost(self, reason: str) -> ReplicaLostError:
        self._runtime.restart_needed = reason
        _log.error("draftloop: %s; %s", reason, _RESTART)
        return ReplicaLostError(reason, mend=_RESTART)

    async def reload(self) -> None:
        """Load the drafter that served into an engine whose weights are gone. For a paused engine; hold the lock.

        Raises ReplicaLostError. A drafter that nobody knew cannot be loaded: that the replica is lost is only noted.
        """
        if self._boot is None:
            if self._ready is not None:  # else this engine's drafter was never ours
                self._runtime.serve(None, None, None)
                self._lost("woken without its drafter, which was not known when it went to sleep")
            return
        try:
            with self._touching():
                await self.load("serving")
        except DraftloopError as error:
            raise self._lost(f"woken without its drafter: {error.message}") from error

    async def inspect(self) -> list[dict[str, Any]]:
        """What each worker computes with, read out whole.

        Raises SwapBusyError during a swap, and where the engine does not run: it may have no weights to read.
        """
        await self._require_ready()
        if self._running is not None or self._lock.locked():
            raise SwapBusyError("a swap is under way", mend="wait for it to end")
        async with self._lock:
            await self._require_running()
            return await self._call("draftloop_inspect", timeout_s=READ_TIMEOUT_S)

    async def load(self, slot: str) -> None:
        """Load a copy the workers hold, and look whether it is in. For a paused engine."""
        request = versions.update_request({"slot": slot})
        await self._timely(self._engine.start_draft_weight_update(), "start")
        await self._timely(self._engine.update_weights(request), "update")
        await self._timely(self._engine.finish_weight_update(), "finish")
        for names in await self._call("draftloop_differing", slot):
            if names:
                raise SwapFailedError(f"tensor {names[0]} is not what was loaded")

    async def _prove(self, slot: str) -> None:
        """Compare all of every tensor, a piece a call: requests run between them. Raises SwapFailedError."""
        counts: dict[str, int] = {}
        for worker in await self._call("draftloop_pieces", slot):
            for name, count in worker.items():
                counts[name] = max(count, counts.get(name, 0))
        for name, count in counts.items():
            for piece in range(count):
                if any(await self._call("draftloop_differing", slot, name, piece)):
                    raise SwapFailedError(f"tensor {name} is not what was loaded")

    async def _resume(self) -> None:
        try:
            await self._timely(self._engine.resume_generation(), "resume")
        except DraftloopError as error:
            raise self._lost(f"the engine could not be resumed: {error.message}") from error

    async def _call(self, method: str, *args: str | int, timeout_s: float = STEP_TIMEOUT_S) -> list[Any]:
        """One answer a worker."""
        return list(await self._timely(self._engine.collective_rpc(method, args=args), method, timeout_s))

    async def _timely(self, call: Awaitable[_T], name: str, timeout_s: float = STEP_TIMEOUT_S) -> _T:
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise SwapFailedError(f"the engine did not answer {name} within {timeout_s:.0f} s") from None
        except Exception as error:  # what a worker raises arrives in whatever class vLLM gives it
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise SwapFailedError(f"{name}: {said[-1]}") from error

"""A swap and what else happens to its engine: pauses, sleep, faults at each step; what serves is always said right."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from swap_twin import Site, make_site, tensors  # noqa: E402

from draftloop.pipeline.errors import (  # noqa: E402
    EngineUnsupportedError,
    ReplicaLostError,
    SwapBusyError,
    SwapFailedError,
    SwapRefusedError,
)
from draftloop.serving_hooks.vllm import checks, proof, swap  # noqa: E402


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return make_site(tmp_path, monkeypatch)


def fail() -> RuntimeError:
    return RuntimeError("told to fail")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def waits(call: Awaitable[Any]) -> asyncio.Task[Any]:
    """The call, begun and not ended however often the loop turns."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0.05)
    assert not task.done()
    return task


def test_a_swap_replaces_proves_and_keeps(site: Site) -> None:
    async def run() -> None:
        swapper = site.start()
        assert (await swapper.swap("2", site.digests["2"])).version == "2"

    asyncio.run(run())
    assert site.serves("2")
    assert site.runtime.served.version == "2"
    assert not site.engine.paused
    assert site.runtime.swaps == {"done": 1}


# The proof, with requests running.


def test_a_proof_looks_at_every_weight_a_bounded_piece_a_call(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_BYTES", 3 * 24 * 4)  # three rows of fc
    monkeypatch.setattr(proof, "_COLUMNS", range(3, 4))

    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        site.engine.calls.clear()
        site.drafter.lm_head.widths.clear()
        await swapper.swap("2", site.digests["2"])

    asyncio.run(run())
    resumed = site.engine.calls.index(("resume",))
    asked = [call[1:] for call in site.engine.calls[resumed:] if call[0] == "draftloop_differing"]
    assert sorted(asked) == [
        *(("staged", "d2t", piece) for piece in range(2)),
        *(("staged", "fc.weight", piece) for piece in range(3)),
        *(("staged", "lm_head.weight", piece) for piece in range(3)),
        ("staged", "norm.weight", 0),
    ]
    assert max(site.drafter.lm_head.widths) == 3


@pytest.mark.parametrize(
    ("name", "row", "column", "piece"),
    [("fc.weight", 0, 23, 0), ("fc.weight", 3, 0, 1), ("fc.weight", 7, 0, 2), ("lm_head.weight", 39, 2, 0),
     ("lm_head.weight", 0, 3, 1), ("lm_head.weight", 20, 7, 2), ("norm.weight", 7, None, 0), ("d2t", 36, None, 1)],
)  # fmt: skip
def test_what_is_altered_is_seen_in_its_piece_and_in_no_other(
    name: str, row: int, column: int | None, piece: int, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_BYTES", 3 * 24 * 4)
    monkeypatch.setattr(proof, "_COLUMNS", range(3, 4))
    wanted = tensors("boot")
    counts = proof.pieces(site.drafter, wanted)
    assert counts == {"fc.weight": 3, "lm_head.weight": 3, "norm.weight": 1, "d2t": 2}
    site.drafter.place(name)[row if column is None else (row, column)] += 1
    found = [one for one in range(counts[name] + 2) if proof.differing(site.drafter, wanted, piece=one)]
    assert found == [piece]
    assert proof.differing(site.drafter, wanted) == [name]


def test_a_proof_moves_the_files_tensors_to_the_live_ones_and_none_of_those(site: Site) -> None:
    """A device's memory is read where it lies."""

    class Seen(torch.overrides.TorchFunctionMode):
        moved = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.Tensor.cpu, torch.Tensor.numpy):
                self.moved += 1
            return function(*args, **(kwargs or {}))

    with Seen() as seen:
        assert proof.differing(site.drafter, tensors("boot")) == []
    assert seen.moved == 0


# Files that are read for ever.


def test_a_file_that_is_still_being_read_keeps_neither_the_engine_nor_the_next_swap_waiting(
    site: Site, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "hangs")
    disk = site.engine.worker.weight_transfer_engine

    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        assert disk.stage(str(tmp_path / "hangs"), "0" * 64) is True
        began = time.monotonic()
        with pytest.raises(SwapBusyError, match="the last file is still being read"):
            await swapper.swap("2", site.digests["2"])
        assert time.monotonic() - began < 5
        assert ("pause", "keep") not in site.engine.calls
        assert disk.staged() is None
        with (tmp_path / "hangs").open("wb"):
            pass
        await until(lambda: disk.staged() is not None)
        assert "was changed" in disk.staged()["error"]
        await swapper.swap("2", site.digests["2"])

    asyncio.run(run())
    assert site.serves("2")


def test_a_read_that_ends_late_fills_no_slot_of_another(site: Site) -> None:
    weights = site.place("2") / "model.safetensors"
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    disk = site.engine.worker.weight_transfer_engine
    late = disk._turn
    assert disk.stage(str(weights), sha256)
    while disk.staged() is None:
        time.sleep(0.001)
    digest = disk.staged()["digest"]
    for path, found in ((site.place("3") / "model.safetensors", None), (weights.with_name("absent"), None)):
        disk._read(late, path, hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "")
        assert disk.staged() == {"digest": digest, "error": found, "mend": None}


def test_a_check_that_hangs_is_given_up_and_keeps_nobody_waiting(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others pause, resume and sleep meanwhile: nothing has touched the engine yet."""
    release = threading.Event()
    check = checks.check_version
    monkeypatch.setattr(swap, "READ_TIMEOUT_S", 0.5)

    def hang(*args: Any) -> Any:
        release.wait(20)
        return check(*args)

    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        monkeypatch.setattr(checks, "check_version", hang)
        swapping = await waits(swapper.swap("2", site.digests["2"]))
        await site.engine.pause_generation(mode="keep")
        await site.engine.resume_generation()
        await site.engine.sleep(1)
        await site.engine.wake_up()
        with pytest.raises(SwapRefusedError, match="version 2 could not be read"):
            await swapping
        release.set()

    asyncio.run(run())
    assert site.runtime.swaps == {"refused": 1}


# Others who pause, resume, wake or put to sleep.


@pytest.mark.parametrize("step", ["update", "draftloop_differing", "draftloop_adopt"])
@pytest.mark.parametrize("name", ["resume", "pause", "wake_up", "sleep"])
def test_others_calls_wait_for_a_swap_to_end(name: str, step: str, site: Site) -> None:
    """A resume in the middle would run requests on half a drafter."""
    engine = site.engine
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "resume": engine.resume_generation,
        "pause": lambda: engine.pause_generation(mode="wait"),
        "wake_up": engine.wake_up,
        "sleep": lambda: engine.sleep(1),
    }

    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        gate = engine.gates[step] = asyncio.Event()
        engine.calls.clear()
        swapping = asyncio.create_task(swapper.swap("2", site.digests["2"]))
        await until(lambda: step in [call[0] for call in engine.calls])
        other = await waits(calls[name]())
        gate.set()
        await swapping
        await other

    asyncio.run(run())
    assert engine.calls[-1][0] == name
    assert site.serves("2")
    assert engine.paused == (name in ("pause", "sleep"))


def test_a_swap_does_not_begin_in_an_engine_that_is_being_paused(site: Site) -> None:
    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        gate = site.engine.gates["pause"] = asyncio.Event()
        pausing = await waits(site.engine.pause_generation(mode="wait"))
        with pytest.raises(SwapBusyError, match="paused by somebody else"):
            await swapper.swap("2", site.digests["2"])
        await site.engine.resume_generation()  # waits for nobody: the pause may be waiting for it
        gate.set()
        await pausing
        with pytest.raises(SwapBusyError, match="paused by somebody else"):
            await swapper.swap("2", site.digests["2"])
        await site.engine.resume_generation()
        await swapper.swap("2", site.digests["2"])

    asyncio.run(run())
    assert site.serves("2")


@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_an_engine_that_does_not_run_is_not_read_out(how: str, site: Site) -> None:
    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        await (site.engine.sleep(1) if how == "sleep" else site.engine.pause_generation(mode="keep"))
        with pytest.raises(SwapBusyError, match="paused by somebody else, or sleeps"):
            await swapper.inspect()

    asyncio.run(run())
    assert "draftloop_inspect" not in [call[0] for call in site.engine.calls]


def test_an_engine_sleeps_when_its_drafter_is_known_and_comes_back_with_it(site: Site) -> None:
    async def run() -> None:
        gate = site.engine.gates["draftloop_staged"] = asyncio.Event()
        site.start()
        sleeping = await waits(site.engine.sleep(2))
        gate.set()
        await sleeping
        assert not site.serves("boot")
        await site.engine.wake_up()

    asyncio.run(run())
    assert site.serves("boot")
    assert site.runtime.restart_needed is None


def test_a_drafter_that_could_not_be_known_is_missed_when_its_engine_wakes(site: Site) -> None:
    (site.place("boot") / "COMPLETE").unlink()

    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        await site.engine.sleep(1)
        await site.engine.wake_up()
        assert site.runtime.restart_needed is None
        await site.engine.sleep(2)
        assert await site.engine.wake_up() is True

    asyncio.run(run())
    assert site.runtime.restart_needed is not None
    assert "woken without its drafter" in site.runtime.restart_needed
    assert not site.engine.paused


def test_an_engine_that_slept_before_it_was_met_does_not_come_back_as_if_nothing_were(site: Site) -> None:
    async def run() -> None:
        await site.engine.sleep(2)
        swapper = site.start()
        await swapper.known()
        assert swapper.refusal is not None
        assert "slept before its drafter was known" in swapper.refusal.message
        await site.engine.wake_up()

    asyncio.run(run())
    assert site.runtime.restart_needed is not None


def test_an_engine_whose_drafter_is_not_ours_wakes_as_it_always_did(site: Site) -> None:
    async def run() -> None:
        site.start(EngineUnsupportedError("the engine was started without a way to take weights"))
        await site.engine.sleep(2)
        await site.engine.wake_up()

    asyncio.run(run())
    assert site.runtime.restart_needed is None


# Faults at each step.


def test_a_failed_proof_is_undone(site: Site) -> None:
    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        site.engine.faults["draftloop_differing"] = [None, fail()]
        with pytest.raises(SwapFailedError, match="told to fail; boot serves again"):
            await swapper.swap("2", site.digests["2"])

    asyncio.run(run())
    assert site.serves("boot")
    assert site.runtime.served.version == "boot"
    assert site.runtime.restart_needed is None
    assert site.runtime.swaps == {"failed": 1}


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"draftloop_adopt": [fail()]}, "version 2 serves, but not for good: draftloop_adopt: told to fail"),
        (
            {"draftloop_differing": [None, fail()], "pause": [None, fail()]},
            r"version 2 failed \(draftloop_differing: told to fail\) and boot could not be brought back "
            r"\(pause: told to fail\)",
        ),
        (
            {"draftloop_differing": [None, fail()], "start": [None, fail()]},
            r"boot could not be brought back \(start: told to fail\)",
        ),
        ({"draftloop_pieces": ["odd"]}, "version 2 failed: AttributeError"),
    ],
)
def test_a_drafter_that_serves_unproven_or_not_for_good_is_a_lost_replica(
    faults: dict[str, Any], said: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        site.engine.faults.update(faults)
        with pytest.raises(ReplicaLostError, match=said):
            await swapper.swap("2", site.digests["2"])
        with pytest.raises(ReplicaLostError):
            await swapper.swap("2", site.digests["2"])

    asyncio.run(run())
    assert site.runtime.restart_needed is not None
    assert site.runtime.served.version == ("2" if "draftloop_adopt" in faults else None)
    assert not site.engine.paused
    assert site.runtime.swaps["failed"] >= 1


def test_an_engine_that_does_not_say_whether_it_runs_is_not_touched(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        swapper = site.start()
        await swapper.known()
        for name in ("is_paused", "is_sleeping"):
            site.engine.faults[name] = [fail()]
            with pytest.raises(SwapFailedError, match=f"{name}: told to fail"):
                await swapper.swap("2", site.digests["2"])

    asyncio.run(run())
    assert ("pause", "keep") not in site.engine.calls
    assert site.runtime.restart_needed is None

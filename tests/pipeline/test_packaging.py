"""The layout: one import name, no shadowing, a wheel that runs outside the checkout."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
ROOMS = ("pipeline", "trainers", "serving_hooks", "kernels")


def test_bare_import_of_a_room_does_not_find_ours() -> None:
    for room in ROOMS:
        found = importlib.util.find_spec(room)
        assert found is None or not str(found.origin).startswith(str(CHECKOUT)), (
            f"import {room} resolves into the checkout"
        )


def test_what_we_start_from_the_checkout_runs_with_a_safe_path() -> None:
    assert sys.flags.safe_path, "start the tests with PYTHONSAFEPATH=1, as `make test` does"
    finder = "import importlib.util as u, sys; s = u.find_spec('kernels'); print(s.origin if s else None)"
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    out = subprocess.run(
        [sys.executable, "-c", finder], cwd=CHECKOUT, env=env, capture_output=True, text=True, check=True
    )
    assert str(CHECKOUT) not in out.stdout


def test_every_room_says_in_its_docstring_what_lives_there() -> None:
    for room in ROOMS:
        for init in (CHECKOUT / room).rglob("__init__.py"):
            text = init.read_text()
            assert text.startswith('"""'), f"{init} has no docstring"


def test_help_answers_without_torch_and_in_about_a_second() -> None:
    code = (
        "import sys, time; t=time.time(); import draftloop.pipeline.cli; print(time.time()-t, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    seconds, torch_loaded = out.stdout.split()
    assert torch_loaded == "False"
    assert float(seconds) < 3  # a loaded test machine; about 0.4 on an idle one


def test_the_serving_hook_imports_without_torch_mlflow_datasets_or_deepspeed() -> None:
    code = (
        "import sys, draftloop.serving_hooks.capture, draftloop.pipeline.stream.sqlite_log;"
        "print([name for name in ('torch', 'mlflow', 'datasets', 'deepspeed', 'transformers') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert out.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_built_wheel_holds_every_room_and_runs_outside_the_checkout(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(CHECKOUT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = wheels.glob("draftloop-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for room in ROOMS:
        assert f"draftloop/{room}/__init__.py" in names
    assert "draftloop/py.typed" in names
    assert not [name for name in names if name.split("/")[0] in ROOMS], "a room was packed under its bare name"

    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    code = "import draftloop.pipeline.cli as c; print(c.__file__)"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site)}
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.startswith(str(site))
    out = subprocess.run(
        [sys.executable, "-m", "draftloop.pipeline.cli", "config", "--json"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert '"work"' in out.stdout

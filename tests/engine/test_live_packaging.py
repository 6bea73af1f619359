"""The plug-in in somebody's engine environment: nothing there changes, nothing of our extras is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

CHECKOUT = Path(__file__).resolve().parents[2]
EXTRAS = ("mlflow", "datasets", "deepspeed", "accelerate", "gguf", "matplotlib", "scipy", "kafka", "confluent_kafka")


def run(command: list[str | Path]) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout as a wheel."""
    out = tmp_path_factory.mktemp("wheels")
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, CHECKOUT])
    (built,) = out.glob("draftloop-*.whl")
    return built


def test_installing_the_plug_in_touches_no_package_that_is_there(engine_python: Path, wheel: Path) -> None:
    # Without an index: whatever it needed beyond what vLLM brought would fail, a change of version even more so.
    report = run([engine_python, "-m", "pip", "install", "--quiet", "--dry-run", "--no-index", "--report", "-", wheel])
    assert {item["metadata"]["name"] for item in json.loads(report)["install"]} <= {"draftloop"}


def test_the_environment_that_make_engine_made_still_is_its_list(engine_python: Path) -> None:
    if engine_python != CHECKOUT / ".venv-engine" / "bin" / "python":
        pytest.skip("another environment than make engine's: it has its own versions")
    listed = (CHECKOUT / "constraints-engine.txt").read_text().split()
    code = (
        "import json, importlib.metadata as m;"
        "print(json.dumps([[d.metadata['Name'], d.version] for d in m.distributions()]))"
    )
    found = {
        f"{normal(name)}=={version.partition('+')[0]}" for name, version in json.loads(run([engine_python, "-c", code]))
    }
    wanted = {f"{normal(name)}=={version}" for name, version in (line.split("==") for line in listed)}
    assert wanted - found == set()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_settings_and_runtime_of_the_plug_in_import_without_torch(engine_python: Path) -> None:
    names = ", ".join(f"draftloop.serving_hooks.vllm.{name}" for name in ("settings", "runtime", "versions"))
    assert run([engine_python, "-c", f"import sys, {names}; print('torch' in sys.modules)"]).strip() == "False"


def test_every_part_is_found_under_one_name_and_none_imports_our_extras(engine_python: Path) -> None:
    code = (
        "import sys; from importlib.metadata import entry_points as e;"
        "print(*(x.load().__name__ for g in ('general', 'stat_logger', 'endpoint')"
        " for x in e(group=f'vllm.{g}_plugins', name='draftloop')));"
        f"print([name for name in {EXTRAS!r} if name in sys.modules])"
    )
    assert run([engine_python, "-c", code]).splitlines()[-2:] == ["register StepCounters AdminPlugin", "[]"]


def test_a_release_nobody_tried_is_refused_by_name_and_its_server_still_knows_our_flag(
    engine_python: Path, tmp_path: Path
) -> None:
    code = (
        "from draftloop.serving_hooks.vllm import versions; versions.SUPPORTED = ('0.31',);"
        "from draftloop.serving_hooks.vllm import plugin, runtime; plugin.register(); plugin.register();"
        "print(type(runtime.current().trouble).__name__, runtime.current().trouble.message);"
        "print('draft_disk' in versions.transfer_factory()._registry);"
        "print(hasattr(versions.worker_base(), 'draftloop_stage'))"
    )
    settings = tmp_path / "serving.toml"
    settings.write_text('target = "absent.json"\n')
    told, known, patched = run(["env", f"DRAFTLOOP_SERVING={settings}", engine_python, "-c", code]).splitlines()[-3:]
    assert re.fullmatch(r"EngineUnsupportedError vLLM 0.32.0\S*: this draftloop knows 0.31.x", told)
    assert (known, patched) == ("True", "False")

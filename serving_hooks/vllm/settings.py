"""What the plug-in is told: one TOML file, named by DRAFTLOOP_SERVING. Only this file reads the environment.

vLLM builds a plug-in's parts without arguments and passes none of its flags on, so a file named by a variable is what
is left.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftloop.pipeline.errors import ConfigError
from draftloop.pipeline.fingerprint import Fingerprint
from draftloop.pipeline.stream.kafka_config import KafkaConfig
from draftloop.pipeline.stream.policy import ConsentPolicy
from draftloop.serving_hooks.outbox import CaptureLimits

VARIABLE = "DRAFTLOOP_SERVING"
FORM = "docs/vllm.md shows the form"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class CaptureSettings(_Section):
    """Where captured requests go. Without a log there is no capture."""

    enabled: bool = True  # at the start; the admin route switches it while the server runs
    topic: str = ""  # draftloop.raw.<target>
    sqlite: Path | None = None  # the capture.db of a work folder on this machine
    kafka: KafkaConfig | None = None
    limits: CaptureLimits = CaptureLimits()
    close_timeout_s: float = Field(default=10.0, gt=0)  # what is queued at the end is delivered or counted in this time

    @model_validator(mode="after")
    def _one_log(self) -> CaptureSettings:
        if self.sqlite is not None and self.kafka is not None:
            raise ValueError("sqlite and kafka exclude each other")
        if (self.sqlite is not None or self.kafka is not None) and not self.topic:
            raise ValueError("topic is missing: draftloop.raw.<target>")
        return self


class IdentitySettings(_Section):
    """Who a request belongs to, as the server side knows it. What a client says of itself counts for nothing.

    In this order: a gateway that shows its secret names tenant, subject and conversation in headers; an API key stands
    for a tenant; else `default_tenant`. Where none of these says anything nobody has consented.
    """

    default_tenant: str = ""
    api_keys: dict[str, str] = Field(default_factory=dict)  # sha256 hex of a bearer token -> tenant
    gateway_secret_file: Path | None = None
    subject_key_file: Path | None = None  # subjects become an HMAC-SHA256 with it; without it they are left out


class SwapSettings(_Section):
    """The admin route. Without a token file it does not exist."""

    token_file: Path | None = None
    staging: Path | None = None  # <agent folder>/drafters: one folder a version, put there by the agent
    public_key: Path | None = None  # verdicts signed by another key are refused
    audit_file: Path | None = None  # JSON lines of what was asked of the route; default: beside staging
    allow_remote: bool = False  # True: whoever has the token may call from other machines
    max_drafter_bytes: int = Field(default=8 * 2**30, ge=1)  # a larger drafter is refused before it is read


class ServingSettings(_Section):
    """The whole file."""

    target: Path  # the fingerprint file, written by `draftloop fingerprint`
    engine: Literal["vllm"] = "vllm"
    consent: ConsentPolicy = ConsentPolicy(version="none")  # nobody consents: nothing is kept
    capture: CaptureSettings = CaptureSettings()
    identity: IdentitySettings = IdentitySettings()
    swap: SwapSettings = SwapSettings()

    def fingerprint(self) -> Fingerprint:
        """The target's identity. Raises ConfigError."""
        try:
            return Fingerprint.from_dict(msgspec.json.decode(self.target.read_bytes()))
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"no fingerprint in {self.target}: {error}", mend="write it with `draftloop fingerprint --out FILE`"
            ) from None


def is_named(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment names a file at all: without one nobody has asked for the plug-in."""
    return bool(environ.get(VARIABLE))


def load_settings(environ: Mapping[str, str] = os.environ) -> ServingSettings | None:
    """The file the environment names; None where it names none. Relative paths in it count from its folder.

    Raises ConfigError naming file, key and mend.
    """
    name = environ.get(VARIABLE)
    if not name:
        return None
    file = Path(name)
    try:
        raw = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{VARIABLE}={name}: {error}", mend=FORM) from None
    try:
        return ServingSettings.model_validate(_absolute(raw, file.absolute().parent))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{file}: {key}: {first['msg']}", mend=FORM) from None


_PATHS = frozenset({"target", "sqlite", "gateway_secret_file", "subject_key_file", "token_file", "staging"}) | {
    "public_key",
    "audit_file",
}


def _absolute(values: dict[str, object], folder: Path) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key not in ("kafka", "tenants", "api_keys"):
            made[key] = _absolute(value, folder)
        else:
            made[key] = folder / value if key in _PATHS and isinstance(value, str) else value
    return made

"""Asks a running vLLM whether the plug-in is at work and whether speculation is lossless."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftloop.pipeline import lossless_probe
from draftloop.pipeline.errors import DraftloopError, EngineError
from draftloop.pipeline.replica import canary_prompts
from draftloop.pipeline.rollout.vllm_client import VllmClient
from draftloop.pipeline.workspace import Workspace

GREEDY_TOKENS = 32  # a prompt
PAIRS, PAIR_TOKENS = 24, 24  # sampled texts a side, tokens a text
_ENGINES_OWN = (
    "no drafter can mend this: it is the engine's. Serve what it fails at without speculation, or with another release"
)


def examine_engine(workspace: Workspace, url: str, token_file: Path) -> list[dict[str, Any]]:
    """Findings as doctor's others. Raises ConfigError for an address that is none."""
    client = VllmClient(url, token_file)
    config = workspace.config.agent
    findings: list[dict[str, Any]] = []

    def run(name: str, check: Callable[[], tuple[bool, str, dict[str, Any]]]) -> bool:
        try:
            ok, detail, facts = check()
            mend = "" if ok else _ENGINES_OWN
        except DraftloopError as error:
            ok, detail, mend, facts = False, error.message, error.mend or "", {}
        findings.append({"check": name, "ok": ok, "detail": detail, "mend": mend, "facts": facts})
        return ok

    if not run("engine", lambda: _engine(client)):
        return findings
    prompts = canary_prompts(config.canary_file, client.tokenize)

    def greedy() -> tuple[bool, str, dict[str, Any]]:
        found = lossless_probe.check_greedy(
            client,
            prompts,
            max_tokens=GREEDY_TOKENS,
            tie_margin=config.tie_margin,
            fp32=client.fingerprint().dtype == "float32",
        )
        facts = {
            "identical": found.identical,
            "divergences": [each._asdict() for each in found.divergences],
            "not_best": len(found.not_best),
        }
        return found.lossless, lossless_probe.told_greedy(found), facts

    def sampling() -> tuple[bool, str, dict[str, Any]]:
        texts = lossless_probe.repeated(prompts, PAIRS)
        plain = lossless_probe.plain_side(client, texts, max_tokens=PAIR_TOKENS)
        found = lossless_probe.check_sampling(client, texts, plain, max_tokens=PAIR_TOKENS)
        facts = {
            "with_speculation": found.with_speculation,
            "without": found.without,
            "p_value": found.p_value,
            "pairs": found.num_pairs,
            "tokens": found.num_tokens,
        }
        return found.lossless, lossless_probe.told_sampling(found), facts

    run("greedy", greedy)
    run("sampling", sampling)
    return findings


def _engine(client: VllmClient) -> tuple[bool, str, dict[str, Any]]:
    condition, fingerprint = client.condition(), client.fingerprint()
    if condition.restart_needed is not None:
        raise EngineError(f"restart needed: {condition.restart_needed}", mend="restart this replica")
    status = client.status()
    facts = {"release": status.get("release"), "version": condition.version, "digest": condition.digest}
    detail = f"vLLM {status.get('release')}, target {fingerprint.digest}, drafts with version {condition.version}"
    return True, detail, facts

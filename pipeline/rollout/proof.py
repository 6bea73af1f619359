"""What an engine must show after a swap: the same greedy outputs, and sampled ones that the target stands for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from draftloop.pipeline import lossless_probe
from draftloop.pipeline.errors import (
    AdminDeniedError,
    EngineError,
    EngineUnreachableError,
    InputError,
    SwapFailedError,
)
from draftloop.pipeline.records import Condition, ProbeResult
from draftloop.pipeline.rollout import examine
from draftloop.pipeline.rollout.config import AgentConfig
from draftloop.pipeline.rollout.engine_client import EngineClient, ProbingEngine
from draftloop.pipeline.rollout.journal import Lossless

_GREEDY_PROMPTS = 4  # of the canary prompts: token by token costs a request a token


class Prover:
    """Asks one engine the canary prompts."""

    def __init__(
        self, engine: EngineClient, prompts: Sequence[Sequence[int]], config: AgentConfig, compare: examine.Compare
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._config = config
        self._compare = compare

    def before(self) -> ProbeResult:
        """Greedy outputs of the canary prompts."""
        return self._engine.probe(self._prompts, self._config.probe_tokens)

    def same(self, before: ProbeResult, version: str | None) -> tuple[examine.Ties, ProbeResult]:
        """Ties and the probe now. Raises SwapFailedError unless `version` serves and says what was said before."""
        found = self._engine.drafter_version()
        if found != version:
            raise SwapFailedError(f"the engine says it drafts with version {found}, not {version}")
        after = self.before()
        return examine.require_same_outputs(before, after, self._compare, self._config.tie_margin), after

    def lossless(self, known: Lossless) -> Lossless:
        """Ask whether speculation is lossless, unless it was asked of this process and drafter."""
        condition = self._engine.condition()
        if (known.boot_id, known.version) == (condition.boot_id, condition.version):
            return known
        return self._ask(known, condition)

    def still_lossless(self, earlier: Lossless) -> Lossless:
        """Ask again after a swap. Raises SwapFailedError where only the new drafter can have made the difference.

        A sampling test that fails is repeated with other texts: chance fails twice in a million swaps.
        """
        condition = self._engine.condition()
        now = self._ask(earlier, condition)
        if earlier.sampling and now.sampling is False:
            now = self._ask(msgspec.structs.replace(earlier, plain=None), condition)
        for was, holds in ((earlier.greedy, now.greedy), (earlier.sampling, now.sampling)):
            if was and holds is False:
                raise SwapFailedError(f"outputs are not the target's since the swap: {now.reason}")
        return now

    def _ask(self, known: Lossless, condition: Condition) -> Lossless:
        engine, config = self._engine, self._config
        nothing = Lossless(boot_id=condition.boot_id, version=condition.version)
        if config.sampling_check == "off" or not isinstance(engine, ProbingEngine):
            return nothing
        texts = lossless_probe.repeated(self._prompts, config.sampling_pairs)
        plain = known.plain if known.boot_id == condition.boot_id else None
        try:
            greedy = lossless_probe.check_greedy(
                engine,
                self._prompts[:_GREEDY_PROMPTS],
                max_tokens=config.probe_tokens,
                tie_margin=config.tie_margin,
                fp32=self._engine.fingerprint().dtype == "float32",
            )
            if plain is None:
                plain = lossless_probe.plain_side(engine, texts, max_tokens=config.sampling_tokens)
            sampled = lossless_probe.check_sampling(engine, texts, plain, max_tokens=config.sampling_tokens)
        except (EngineUnreachableError, AdminDeniedError):
            raise
        except (EngineError, InputError) as error:
            return msgspec.structs.replace(nothing, plain=plain, reason=f"could not be asked: {error.message}")
        return msgspec.structs.replace(
            nothing,
            greedy=greedy.lossless,
            sampling=sampled.lossless,
            plain=plain,
            reason=f"{lossless_probe.told_greedy(greedy)}; {lossless_probe.told_sampling(sampled)}",
        )

"""The demo's traffic: the project's own prompts as chat requests; the same seed and round give the same requests."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from draftloop.pipeline.data.chat import render_prompt
from draftloop.pipeline.data.prompts import prompts
from draftloop.pipeline.records import Sampling
from draftloop.serving_hooks.embedded.engine import Request

if TYPE_CHECKING:
    from draftloop.pipeline.data.snapshot import Row
    from draftloop.trainers.target import Target

Domain = Literal["kitchen", "python"]

CONSENTING = "acme"
NOT_CONSENTING = "zenith"  # every twentieth request: leaves a counter and nothing else
MEASURING = "draftloop-measurements"  # ours: has no consent either, so a measurement never becomes training data


def domain_requests(
    target: Target, domain: Domain, *, count: int, round_number: int, seed: int, max_tokens: int
) -> list[Request]:
    """`count` requests of one domain. Each round draws other prompts until all were used, then starts over."""
    texts = prompts(domain)
    random.Random(f"{seed}-{domain}").shuffle(texts)
    first = round_number * count
    chosen = [texts[(first + index) % len(texts)] for index in range(count)]
    return [
        Request(
            request_id=f"r{round_number}-{domain}-{index:04d}",
            prompt_ids=tuple(render_prompt(target.tokenizer, [{"role": "user", "content": text}])),
            sampling=Sampling(temperature=0.0, max_tokens=max_tokens),
            conversation_id=f"{domain}-{hashlib.sha256(text.encode()).hexdigest()[:12]}",
            tenant=NOT_CONSENTING if index % 20 == 19 else CONSENTING,
            subject=f"subject-{index % 40:02d}",
            slices={"domain": domain, "language": "en", "route": "chat"},
        )
        for index, text in enumerate(chosen)
    ]


def measured_again(requests: Sequence[Request], label: str) -> list[Request]:
    """The same requests as measurements: another id, and a tenant whose requests are never kept."""
    return [
        Request(
            request_id=f"{label}-{request.request_id}",
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            conversation_id=request.conversation_id,
            tenant=MEASURING,
            subject="none",
            slices=request.slices,
        )
        for request in requests
    ]


def requests_of(rows: Sequence[Row], *, max_tokens: int) -> list[Request]:
    """Held-out rows as measurements of the live engine."""
    return [
        Request(
            request_id=f"heldout-{row.record_id}",
            prompt_ids=tuple(row.prompt_ids),
            sampling=Sampling(temperature=0.0, max_tokens=max_tokens),
            conversation_id=row.conversation_id,
            tenant=MEASURING,
            subject="none",
            slices=row.slices,
        )
        for row in rows
    ]

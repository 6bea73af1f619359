"""What a replay measured, as plain records: the gate and the command line read these without torch.

Definitions (K drafts a step, L accepted of them):
  tau    tokens emitted per target step, bonus token included, prefill's first token excluded: sum tokens / sum steps
  a_k    P(L >= k) over visited steps (unconditional position rate)
  c_k    P(L >= k | L >= k - 1) = a_k / a_{k-1}, a_0 = 1 (conditional: compares drafters depth by depth)
Identity: tokens = steps + sum_k (steps with L >= k) - clipped, where `clipped` counts requests whose last step accepted
every token the text still held and so lost its bonus token (0 or 1 a request). Hence tau = 1 + sum_k a_k = 1 + sum_k
prod_{j<=k} c_j up to clipped / steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from draftloop.pipeline.errors import InputError

UNLABELLED = "(none)"  # slice value of a request without that label


class RequestReplay(msgspec.Struct, frozen=True, kw_only=True):
    """One request's walk."""

    record_id: str
    conversation_id: str
    slices: dict[str, str]
    num_tokens: int  # output tokens less the one from prefill
    num_steps: int
    accepted_at_least: tuple[int, ...]  # steps that accepted >= k drafts, k = 1..K

    @property
    def num_clipped(self) -> int:
        """1 where the text's end cut the last step's bonus token, else 0."""
        return self.num_steps + sum(self.accepted_at_least) - self.num_tokens


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """One drafter over one snapshot's held-out requests."""

    drafter: str
    snapshot_id: str
    k: int
    requests: tuple[RequestReplay, ...]
    target: str = ""  # Fingerprint.digest
    drafter_digest: str | None = None  # None: no drafter, or the n-gram floor

    @property
    def num_tokens(self) -> int:
        """Tokens that speculation emitted."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def num_steps(self) -> int:
        """Target steps after prefill."""
        return sum(request.num_steps for request in self.requests)

    @property
    def tau(self) -> float:
        """Step-weighted tau; 1.0 where there was no step."""
        return tau_of(self.requests)

    @property
    def mean_request_tau(self) -> float:
        """Mean over requests of each request's tau: what some papers print. The gate does not use it."""
        taus = [request.num_tokens / request.num_steps for request in self.requests if request.num_steps]
        return sum(taus) / len(taus) if taus else 1.0

    @property
    def position_rates(self) -> tuple[float, ...]:
        """a_k, k = 1..K; 0 where there was no step."""
        steps = self.num_steps
        return tuple(count / steps if steps else 0.0 for count in self._at_least())

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """c_k, k = 1..K; 0 where depth k was never reached."""
        reached = (self.num_steps, *self._at_least())
        return tuple(now / before if before else 0.0 for before, now in pairwise(reached))

    def tau_by_slice(self, key: str) -> dict[str, float]:
        """tau of each value of one slice label, in value order."""
        return {value: tau_of(requests) for value, requests in by_slice(self.requests, key).items()}

    def to_json(self) -> bytes:
        """JSON that from_json reads back to an equal report."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes | str) -> ReplayReport:
        """Raises InputError for anything that is not a replay report."""
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InputError(f"not a replay report: {error}", mend="make it with `draftloop replay`") from error

    def _at_least(self) -> tuple[int, ...]:
        return tuple(sum(request.accepted_at_least[depth] for request in self.requests) for depth in range(self.k))


def by_slice(requests: tuple[RequestReplay, ...], key: str) -> dict[str, tuple[RequestReplay, ...]]:
    """Requests grouped by one slice label, in value order; requests without it under "(none)"."""
    groups: dict[str, list[RequestReplay]] = defaultdict(list)
    for request in requests:
        groups[request.slices.get(key) or UNLABELLED].append(request)
    return {value: tuple(groups[value]) for value in sorted(groups)}


def tau_of(requests: Sequence[RequestReplay]) -> float:
    """Step-weighted tau of some requests; 1.0 where there was no step."""
    steps = sum(request.num_steps for request in requests)
    return sum(request.num_tokens for request in requests) / steps if steps else 1.0

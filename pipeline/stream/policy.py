"""Who allowed what: the consent policy, and the decision about one request. Pure; default deny."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal, NamedTuple

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from draftloop.pipeline.records import Consent


class TenantConsent(BaseModel):
    """What one tenant permits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    purpose: Literal["train"] = "train"
    sample_rate: float = Field(default=1.0, ge=0, le=1)  # share of this tenant's requests, by request id
    expires: AwareDatetime | None = None  # from this moment on: denied


class ConsentPolicy(BaseModel):
    """The permissions in force. There is no way to allow everybody: a tenant is named, vouched for by a trusted gateway
    request by request, or denied.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    default: Literal["deny"] = "deny"
    tenants: dict[str, TenantConsent] = Field(default_factory=dict)

    def stands(self, tenant: str) -> bool:
        """Whether what is decided about one request of a tenant holds for all of them, at any time."""
        permission = self.tenants.get(tenant)
        return permission is None or (permission.expires is None and permission.sample_rate >= 1.0)


Assertion = Literal["train", "deny"]  # what somebody the server trusts says about one request; None: nothing


class Decision(NamedTuple):
    """`consent` is set exactly where the request may be kept; `reason` says why not otherwise."""

    consent: Consent | None
    reason: Literal["allowed", "no_consent", "expired", "not_sampled", "denied"]


def decide(
    policy: ConsentPolicy,
    tenant: str,
    request_id: str,
    *,
    asserted: Assertion | None = None,
    now: datetime | None = None,
) -> Decision:
    """Whether a request may be kept. `now` must be given by who wants the answer repeatable; default: this moment.

    asserted: by a trusted gateway "train" allows a tenant that the policy does not name, but never one whose permission
    has expired, and samples as the policy says; "deny" denies, whoever says it.
    """
    if asserted == "deny":
        return Decision(None, "denied")
    permission = policy.tenants.get(tenant)
    if permission is None:
        if asserted is None or not tenant:
            return Decision(None, "no_consent")
        return Decision(_consent(policy.version, "gateway"), "allowed")
    if permission.expires is not None and (now or datetime.now(UTC)) >= permission.expires:
        return Decision(None, "expired")
    if permission.sample_rate < 1.0 and share_of(request_id) >= permission.sample_rate:
        return Decision(None, "not_sampled")
    return Decision(_consent(policy.version, "tenant-policy" if asserted is None else "gateway"), "allowed")


@lru_cache(maxsize=64)
def _consent(policy_version: str, basis: str) -> Consent:
    return Consent(purpose="train", policy_version=policy_version, basis=basis)


def share_of(request_id: str) -> float:
    """A number in [0, 1) that depends on the request id alone: raising a sample rate only ever adds requests."""
    return int.from_bytes(hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).digest()[:6], "big") / 2**48

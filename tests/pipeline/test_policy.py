"""Consent: default deny, pure, repeatable."""

from __future__ import annotations

from datetime import UTC, datetime

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.pipeline.records import Consent
from draftloop.pipeline.stream.policy import ConsentPolicy, Decision, TenantConsent, decide, share_of


def policy_of(**tenants: TenantConsent) -> ConsentPolicy:
    return ConsentPolicy(version="7", tenants=tenants)


def test_a_named_tenant_is_allowed_with_its_basis() -> None:
    found = decide(policy_of(acme=TenantConsent()), "acme", "r1")
    assert found == Decision(Consent(purpose="train", policy_version="7", basis="tenant-policy"), "allowed")


@given(tenant=st.text(), request_id=st.text())
def test_whoever_is_not_named_is_denied(tenant: str, request_id: str) -> None:
    assert decide(policy_of(), tenant, request_id) == Decision(None, "no_consent")


def test_there_is_no_way_to_allow_by_default() -> None:
    with pytest.raises(pydantic.ValidationError, match="default"):
        ConsentPolicy.model_validate({"version": "1", "default": "allow"})
    with pytest.raises(pydantic.ValidationError, match="everyone"):
        ConsentPolicy.model_validate({"version": "1", "everyone": True})
    with pytest.raises(pydantic.ValidationError, match="purpose"):
        ConsentPolicy.model_validate({"version": "1", "tenants": {"a": {"purpose": "sell"}}})


def test_a_permission_ends_at_its_moment() -> None:
    policy = policy_of(acme=TenantConsent(expires=datetime(2030, 1, 1, tzinfo=UTC)))
    assert decide(policy, "acme", "r", now=datetime(2029, 12, 31, tzinfo=UTC)).reason == "allowed"
    assert decide(policy, "acme", "r", now=datetime(2030, 1, 1, tzinfo=UTC)) == Decision(None, "expired")


def test_a_permission_without_a_time_zone_is_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="timezone"):
        TenantConsent(expires=datetime(2030, 1, 1))


@given(request_id=st.text(), rate=st.floats(0, 1))
def test_sampling_depends_on_the_request_id_alone(request_id: str, rate: float) -> None:
    one = decide(policy_of(a=TenantConsent(sample_rate=rate)), "a", request_id)
    assert one == decide(policy_of(a=TenantConsent(sample_rate=rate)), "a", request_id)
    assert (one.reason == "allowed") == (share_of(request_id) < rate)


@given(request_id=st.text(), rates=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_higher_rate_keeps_all_that_a_lower_one_kept(request_id: str, rates: tuple[float, float]) -> None:
    low, high = sorted(rates)
    if decide(policy_of(a=TenantConsent(sample_rate=low)), "a", request_id).consent:
        assert decide(policy_of(a=TenantConsent(sample_rate=high)), "a", request_id).consent


def test_rate_one_keeps_all_and_rate_zero_none_and_a_quarter_a_quarter() -> None:
    ids = [f"request-{index}" for index in range(4000)]
    kept = {
        rate: sum(decide(policy_of(a=TenantConsent(sample_rate=rate)), "a", each).consent is not None for each in ids)
        for rate in (0.0, 0.25, 1.0)
    }
    assert kept[0.0] == 0
    assert kept[1.0] == 4000
    assert abs(kept[0.25] - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5


TENANTS = st.sampled_from(["", "acme", "former", "quarter", "nobody"])
NAMED = policy_of(
    acme=TenantConsent(),
    former=TenantConsent(expires=datetime(2020, 1, 1, tzinfo=UTC)),
    quarter=TenantConsent(sample_rate=0.25),
)


@given(tenant=TENANTS, request_id=st.text())
def test_a_denial_denies_whatever_the_policy_says(tenant: str, request_id: str) -> None:
    assert decide(NAMED, tenant, request_id, asserted="deny") == Decision(None, "denied")


@given(tenant=TENANTS, request_id=st.text())
def test_a_gateways_word_adds_unnamed_tenants_and_nothing_else(tenant: str, request_id: str) -> None:
    alone = decide(NAMED, tenant, request_id)
    vouched = decide(NAMED, tenant, request_id, asserted="train")
    assert vouched.reason == ("allowed" if tenant == "nobody" else alone.reason)
    if vouched.consent is not None:
        assert vouched.consent == Consent(purpose="train", policy_version="7", basis="gateway")


def test_an_expired_permission_is_expired_for_a_gateway_too_and_nobody_is_no_tenant() -> None:
    assert decide(NAMED, "former", "r", asserted="train") == Decision(None, "expired")
    assert decide(NAMED, "", "r", asserted="train") == Decision(None, "no_consent")

"""Verification: exact token tables, the plain references, and the joint distribution by enumeration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from draftloop.kernels.verify import (  # noqa: E402
    filtered_probs,
    filtered_probs_plain,
    sample_inverse,
    verify_greedy,
    verify_greedy_plain,
    verify_sampled,
    verify_sampled_plain,
)


@pytest.mark.parametrize(
    ("drafts", "targets", "count", "accepted", "following"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 3, 3, 8),  # all, and the bonus token
        ([5, 9, 7], [5, 6, 7, 8], 3, 1, 6),  # the first difference ends it, later matches do not count
        ([9, 6, 7], [5, 6, 7, 8], 3, 0, 5),
        ([5, 6, 7], [5, 6, 7, 8], 2, 2, 7),  # padding behind the drafts is never accepted
        ([5, 6, 7], [5, 6, 7, 8], 0, 0, 5),
    ],
)
def test_greedy_verification_table(
    drafts: list[int], targets: list[int], count: int, accepted: int, following: int
) -> None:
    found = verify_greedy(torch.tensor([drafts]), torch.tensor([targets]), torch.tensor([count]))
    assert (found.accepted.tolist(), found.next_ids.tolist()) == ([accepted], [following])


def test_a_step_without_drafts_emits_the_targets_token() -> None:
    found = verify_greedy(torch.zeros(2, 0, dtype=torch.int64), torch.tensor([[3], [4]]), torch.tensor([0, 0]))
    assert (found.accepted.tolist(), found.next_ids.tolist()) == ([0, 0], [3, 4])


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 4), width=st.integers(0, 4))
def test_both_kernels_equal_their_plain_references(seed: int, batch: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, 3, (batch, width), generator=generator)
    counts = torch.randint(0, width + 1, (batch,), generator=generator)
    targets = torch.randint(0, 3, (batch, width + 1), generator=generator)
    greedy, plain = verify_greedy(drafts, targets, counts), verify_greedy_plain(drafts, targets, counts)
    assert (greedy.accepted.tolist(), greedy.next_ids.tolist()) == (plain.accepted.tolist(), plain.next_ids.tolist())
    probs = torch.softmax(3 * torch.randn(batch, width + 1, 3, generator=generator), dim=-1)
    numbers = torch.rand(batch, width + 1, generator=generator, dtype=torch.float64)
    arguments = (probs, drafts, counts, numbers[:, :width], numbers[:, width])
    sampled, slow = verify_sampled(*arguments), verify_sampled_plain(*arguments)
    assert (sampled.accepted.tolist(), sampled.next_ids.tolist()) == (slow.accepted.tolist(), slow.next_ids.tolist())


def test_sampling_leaves_the_probabilities_as_they_were() -> None:
    probs = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    verify_sampled(probs, torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[0.9]]), torch.tensor([0.1]))
    assert probs.tolist() == [[[0.5, 0.5], [0.5, 0.5]]]


def test_a_refused_draft_is_never_the_replacement() -> None:
    probs = torch.tensor([[[0.2, 0.8, 0.0], [0.1, 0.1, 0.8]]]).expand(64, -1, -1)
    found = verify_sampled(
        probs, torch.ones(64, 1, dtype=torch.int64), torch.ones(64, dtype=torch.int64),
        torch.full((64, 1), 0.95), torch.linspace(0, 0.999999, 64),
    )  # fmt: skip
    assert set(found.accepted.tolist()) == {0}
    assert set(found.next_ids.tolist()) == {0}


def test_the_joint_distribution_of_emitted_text_is_the_targets_own() -> None:
    """All texts of 3 tokens over a vocabulary of 3, drafted two deep, against the product of conditionals.

    All probabilities are sixths, so a grid of 6 x 6 x 60 uniforms (60 = lcm of every residual mass) measures exactly.
    """
    sixths = [(1, 2, 3), (3, 1, 2), (2, 2, 2), (4, 1, 1), (0, 1, 5), (1, 5, 0), (2, 3, 1)]
    contexts = [text for length in range(3) for text in itertools.product(range(3), repeat=length)]
    law = {text: [part / 6 for part in sixths[index % 7]] for index, text in enumerate(contexts)}
    axes = torch.cartesian_prod(*((torch.arange(size).double() + 0.5) / size for size in (6, 6, 60)))
    cells = axes.shape[0]
    for draft in itertools.product(range(3), repeat=2):
        rows = torch.tensor([law[()], law[draft[:1]], law[draft]]).expand(cells, 3, 3)
        drafts = torch.tensor([draft]).expand(cells, 2)
        found = verify_sampled(rows, drafts, torch.full((cells,), 2), axes[:, :2], axes[:, 2])
        measured = dict.fromkeys(itertools.product(range(3), repeat=3), 0.0)
        for accepted, token in zip(found.accepted.tolist(), found.next_ids.tolist(), strict=True):
            head = (*draft[:accepted], token)
            for tail in itertools.product(range(3), repeat=3 - len(head)):  # later steps sample the target itself
                weight = 1.0 / cells
                for position, following in enumerate(tail):
                    weight *= law[(*head, *tail[:position])][following]
                measured[(*head, *tail)] += weight
        for text, mass in measured.items():
            assert mass == pytest.approx(law[()][text[0]] * law[text[:1]][text[1]] * law[text[:2]][text[2]], abs=1e-9)


def test_sampling_frequencies_approach_the_law() -> None:
    generator = torch.Generator().manual_seed(2)
    law = torch.tensor([0.5, 0.2, 0.0, 0.3])
    count = 40_000
    found = verify_sampled(
        law.expand(count, 2, 4), torch.full((count, 1), 3), torch.ones(count, dtype=torch.int64),
        torch.rand(count, 1, generator=generator), torch.rand(count, generator=generator),
    )  # fmt: skip
    first = torch.where(found.accepted > 0, 3, found.next_ids)
    measured = torch.bincount(first, minlength=4) / count
    assert measured.tolist() == pytest.approx(law.tolist(), abs=4 * 0.5 / count**0.5)
    assert measured[2] == 0


def test_inverse_sampling_never_returns_an_impossible_index() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.75, 0.0]]).expand(4, -1)
    assert sample_inverse(weights, torch.tensor([0.0, 0.24, 0.26, 1.0 - 1e-12])).tolist() == [1, 1, 2, 2]


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([7, 300]),
    temperature=st.sampled_from([0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 290, 500]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_filtering_equals_its_plain_reference(
    seed: int, size: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(2, 2, size, generator=torch.Generator().manual_seed(seed))
    found = filtered_probs(
        logits, torch.tensor([temperature, 1.0]), torch.tensor([top_k, 0]), torch.tensor([top_p, 1.0])
    )
    for position in range(2):
        wanted = filtered_probs_plain(logits[0, position], temperature, top_k, top_p)
        # A token on the edge of top-p may fall on either side in fp32: mass, not membership, is compared.
        assert float((found[0, position].double() - wanted).abs().sum()) < (2e-2 if top_p == 0.999 else 1e-4)
        torch.testing.assert_close(found[1, position], logits[1, position].softmax(-1))


def test_filtering_table() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().view(1, 1, 4)
    one = torch.ones(1)

    def cut(top_k: int, top_p: float) -> list[float]:
        return filtered_probs(logits, one, torch.tensor([top_k]), torch.tensor([top_p]))[0, 0].tolist()

    assert cut(0, 1.0) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert cut(2, 1.0) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert cut(0, 0.69) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert cut(0, 0.71) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert cut(3, 0.5) == pytest.approx([4 / 7, 3 / 7, 0, 0])  # top-p of what top-k left: 0.4 < 0.5 * 0.9
    assert cut(0, 0.01) == [1.0, 0.0, 0.0, 0.0]

"""Every fast training kernel equals its plain reference, in values and in gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftloop.kernels import rows as fast
from draftloop.kernels.soft_target import soft_target_loss, soft_target_loss_reference
from draftloop.kernels.ttt_attention import ttt_attention, ttt_attention_reference, ttt_attention_rows


def _gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_attention_with_diagonals_equals_the_dense_mask(depth: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    query = torch.randn(2, 9, 4, 8, generator=generator)
    keys = [torch.randn(2, 9, 2, 8, generator=generator) for _ in range(depth + 1)]
    values = [torch.randn(2, 9, 2, 8, generator=generator) for _ in range(depth + 1)]
    torch.testing.assert_close(ttt_attention(query, keys, values), ttt_attention_reference(query, keys, values))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_packed_attention_and_its_gradients_equal_the_reference_document_by_document(depth: int) -> None:
    generator = torch.Generator().manual_seed(10 + depth)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    lengths, rows = [7, 3, 5], [4, 3, 1]
    total, positions = sum(rows), sum(lengths)
    query = draw(total, 4, 8)
    keys = [draw(positions, 2, 8), *[draw(total, 2, 8) for _ in range(depth)]]
    values = [draw(positions, 2, 8), *[draw(total, 2, 8) for _ in range(depth)]]
    direction = torch.randn(total, 4, 8, generator=generator)

    expected, start, first = [], 0, 0
    for length, count in zip(lengths, rows, strict=True):
        pad = length - count  # rows that do not ask: zeros at the later depths, dropped below
        full_query = torch.cat([torch.zeros(pad, 4, 8), query[start : start + count]])
        own_keys = [torch.cat([torch.zeros(pad, 2, 8), key[start : start + count]])[None] for key in keys[1:]]
        own_values = [torch.cat([torch.zeros(pad, 2, 8), value[start : start + count]])[None] for value in values[1:]]
        whole = ttt_attention_reference(
            full_query[None],
            [keys[0][first : first + length][None], *own_keys],
            [values[0][first : first + length][None], *own_values],
        )
        expected.append(whole[0, pad:])
        start, first = start + count, first + length
    found = ttt_attention_rows(query, keys, values, lengths, rows)
    torch.testing.assert_close(found, torch.cat(expected))
    inputs = (query, *keys, *values)
    want = _gradients((torch.cat(expected) * direction).sum(), *inputs)
    for have, expect in zip(_gradients((found * direction).sum(), *inputs), want, strict=True):
        torch.testing.assert_close(have, expect, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "extra"),
    [("rms_normalize", (5, 16), (1e-5,)), ("swiglu", (5, 16), ()), ("rotate", (5, 3, 8), None)],
)
def test_row_kernels_and_their_gradients_equal_the_reference(name: str, shape: tuple[int, ...], extra: object) -> None:
    torch.manual_seed(3)
    x = torch.randn(*shape, requires_grad=True)
    if extra is None:
        angles = torch.randn(5, 4).repeat(1, 2)
        extra = (angles.cos(), angles.sin())
    assert isinstance(extra, tuple)
    direction = torch.randn(getattr(fast, f"{name}_reference")(x, *extra).shape)
    want = getattr(fast, f"{name}_reference")(x, *extra)
    have = getattr(fast, name)(x, *extra)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(
        _gradients((have * direction).sum(), x), _gradients((want * direction).sum(), x), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("rows", [1, 37, 300])
def test_chunked_soft_target_loss_and_gradients_equal_the_plain_form(rows: int, train_head: bool) -> None:
    torch.manual_seed(rows)
    student = torch.randn(3, rows, 16, requires_grad=True)
    head = torch.randn(50, 16).requires_grad_(train_head)
    teacher, teacher_head = torch.randn(rows, 16), torch.randn(50, 16)
    weight = torch.rand(3, rows) * (torch.rand(3, rows) > 0.3)
    inputs = (student, head) if train_head else (student,)
    have = soft_target_loss(student, head, teacher, teacher_head, weight)
    want = soft_target_loss_reference(student, head, teacher, teacher_head, weight)
    torch.testing.assert_close(have, want)
    for found, expected in zip(_gradients(have * 0.5, *inputs), _gradients(want * 0.5, *inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_bf16_gradient_of_a_draft_close_to_its_target_is_within_one_percent_of_float64() -> None:
    """The gradient is a difference of nearly equal probabilities: formed in bf16 it would be noise."""
    torch.manual_seed(0)
    vocabulary = 32_000
    teacher = torch.randn(2, 64).bfloat16()
    head = torch.randn(vocabulary, 64).mul(0.3).bfloat16()
    student = (teacher + 0.02 * torch.randn(2, 64)).bfloat16().view(1, 2, 64)
    own_logits, teacher_logits = student[0] @ head.T, teacher @ head.T  # bf16, as the kernel sees them
    exact = own_logits.double().softmax(-1) - teacher_logits.double().softmax(-1)
    want = exact @ head.double()
    inputs = student.clone().requires_grad_()
    loss = soft_target_loss(inputs, head, teacher, head, torch.ones(1, 2))
    (have,) = torch.autograd.grad(loss, inputs)
    assert (have[0].double() - want).norm() / want.norm() < 0.01


def test_equal_logits_give_an_exactly_zero_gradient() -> None:
    torch.manual_seed(1)
    hidden, head = torch.randn(3, 16).bfloat16(), torch.randn(100, 16).bfloat16()
    student = hidden[None].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(soft_target_loss(student, head, hidden, head, torch.ones(1, 3)), student)
    assert gradient.abs().max() < 1e-5

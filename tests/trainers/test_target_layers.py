"""Which hidden state a tap layer means, checked on a target whose blocks add known constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftloop.pipeline.errors import ConfigError
from draftloop.trainers.layer_ids import check_tap_layers, default_tap_layers, from_output_of, to_output_of
from draftloop.trainers.target import Target


class _Adds(nn.Module):
    """A block that adds a constant and nothing else."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states + self.constant


@pytest.mark.parametrize(
    ("tap_layers", "expected"), [((0, 1, 3), (0.0, 1.0, 111.0)), ((1, 2, 3), (1.0, 11.0, 111.0)), ((2,), (11.0,))]
)
def test_a_tap_layer_is_the_state_entering_that_block(
    tiny_target: Any, tap_layers: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    """Block i adds 10^i, the embedding is zero: the state entering block k is the sum over i < k."""
    config = LlamaConfig(
        vocab_size=136, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        bos_token_id=None, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    nn.init.zeros_(model.get_input_embeddings().weight)
    for index in range(4):
        hooked = model.model.layers[index]
        hooked.forward = _Adds(10.0**index).forward  # keeps the class transformers records states of
    target = Target.of(model, tiny_target.tokenizer, folder="adds", dtype="float32", tap_layers=tap_layers)
    taps = target.features(torch.tensor([[5, 6, 7]])).taps
    assert taps[0, :, :, 0].tolist() == [list(expected)] * 3


def test_features_of_a_row_do_not_depend_on_its_neighbours_or_on_a_second_call(tiny_target: Any) -> None:
    rows = [[5, 6, 7, 8, 9], [5, 6, 7], [11, 12], [13, 14, 15, 16], [9]]
    ids = torch.zeros(5, 5, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1
    together, again = tiny_target.features(ids, mask), tiny_target.features(ids, mask)
    assert torch.equal(together.taps, again.taps)
    for index, row in enumerate(rows):
        alone = tiny_target.features(torch.tensor([row]))
        torch.testing.assert_close(together.taps[index, : len(row)], alone.taps[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.last[index, : len(row)], alone.last[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(36, (2, 18, 33)), (4, (1, 2, 3)), (5, (2, 3, 4)), (6, (3, 4, 5))]
)
def test_default_tap_layers_are_distinct_and_inside_the_target(num_layers: int, expected: tuple[int, ...]) -> None:
    assert default_tap_layers(num_layers) == expected
    assert check_tap_layers(expected, num_layers) == expected


def test_a_target_too_shallow_for_the_default_is_refused_naming_the_setting() -> None:
    with pytest.raises(ConfigError, match="2 layers") as caught:
        default_tap_layers(2)
    assert "train.tap_layers" in str(caught.value)


def test_output_of_and_entering_dialects_differ_by_one() -> None:
    assert to_output_of([2, 18, 33]) == [1, 17, 32]
    assert from_output_of([1, 17, 32]) == [2, 18, 33]

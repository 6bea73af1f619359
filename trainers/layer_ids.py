"""The one place where tap-layer dialects meet.

Ours, vLLM's and `speculators`': the hidden state *entering* layer k, HF `hidden_states[k]`, 0 <= k < num_layers.
SGLang's EAGLE-3 config and every DFlash `target_layer_ids`: the *output of* layer i, which is k - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftloop.pipeline.errors import ConfigError


def default_tap_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's {2, L//2, L-3}; for a shallow target the nearest distinct layers. Raises ConfigError under 3."""
    wanted = (2, num_layers // 2, num_layers - 3)
    if 0 < wanted[0] < wanted[1] < wanted[2]:
        return wanted
    if num_layers < 3:
        raise ConfigError(
            f"a target of {num_layers} layers has no three distinct tap layers",
            mend="set train.tap_layers, e.g. [0, 1]",
        )
    return (num_layers - 3, num_layers - 2, num_layers - 1)


def check_tap_layers(tap_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The tap layers if they are ascending, distinct and inside the target. Raises ConfigError naming the setting."""
    taps = tuple(tap_layers)
    if not taps or any(not 0 <= tap < num_layers for tap in taps) or list(taps) != sorted(set(taps)):
        raise ConfigError(
            f"train.tap_layers = {list(taps)} for a target of {num_layers} layers",
            mend=f"name ascending, distinct layers from 0 to {num_layers - 1}",
        )
    return taps


def to_output_of(tap_layers: Sequence[int]) -> list[int]:
    """Ours (entering) to the output-of dialect."""
    return [tap - 1 for tap in tap_layers]


def from_output_of(layer_ids: Sequence[int]) -> list[int]:
    """The output-of dialect to ours (entering)."""
    return [layer + 1 for layer in layer_ids]

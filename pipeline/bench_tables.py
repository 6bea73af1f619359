"""The engine benches' answers for a person."""

from __future__ import annotations

from typing import Any


def swap(found: dict[str, Any]) -> str:
    """Lines."""
    pause, took, gaps, outputs = found["pause_ms"], found["swap_ms"], found["gap_ms"], found["outputs"]
    requests, memory = found["requests"], found["memory_mb"]
    return "\n".join(
        [
            f"{found['swaps']} swaps under {found['streams']} streams, {found['dtype']} target",
            f"pause: median {pause['median']:.0f} ms, p99 {pause['p99']:.0f}, max {pause['max']:.0f}; "
            f"from the call to the proof: median {took['median']:.0f} ms",
            "gap between streamed pieces, p99: "
            f"{gaps['with_swaps']['p99']:.0f} ms with swaps, {gaps['without']['p99']:.0f} without "
            f"(max {gaps['with_swaps']['max']:.0f} and {gaps['without']['max']:.0f})",
            f"{requests['served']} requests during the swaps, {requests['failed']} failed, "
            f"{requests['truncated']} truncated",
            *(f"outputs {name.replace('_', ' ')}: {_outputs(outputs[name])}" for name in ("with_swaps", "without")),
            f"memory: {memory['first']:.0f} MB after the first swap, {memory['last']:.0f} after the last, "
            f"{memory['growth_after_first_quarter']:+.1f} over the last three quarters",
            f"target's weights unchanged: {_yes(found['target_unchanged'])}; "
            f"the drafter is the one that was loaded: {_yes(found['drafter_as_loaded'])}",
        ]
    )


def speed(found: dict[str, Any]) -> str:
    """Lines."""
    rows = [
        f"{batch} at once: {row['with_tokens_per_s']:.1f} tokens/s with, {row['without_tokens_per_s']:.1f} without: "
        f"{row['ratio']:.2f}x ({row['low']:.2f} to {row['high']:.2f})"
        for batch, row in found["batches"].items()
    ]
    return "\n".join([*rows, f"tau {found['tau']:.3f}, {found['pairs']} interleaved pairs, {found['dtype']} target"])


def capture(found: dict[str, Any]) -> str:
    """Lines."""
    serving, cpu = found["serving_us"], found["api_cpu_s"]
    return "\n".join(
        [
            f"capture on over off: {found['ratio']:.4f} ({found['low']:.4f} to {found['high']:.4f}), median of "
            f"{found['pairs']} pairs of {found['requests_a_run']} requests at {found['streams']} streams",
            f"{found['on_tokens_per_s']:.1f} tokens/s on, {found['off_tokens_per_s']:.1f} off; "
            f"CPU of the API process a run: {cpu['on']:.2f} s on, {cpu['off']:.2f} s off",
            f"serving thread, of each request: p50 {serving['p50']:.1f} us, p99 {serving['p99']:.1f} us "
            f"({serving['count']} requests)",
        ]
    )


def _outputs(found: dict[str, Any]) -> str:
    if not found["near_ties"] and not found["others"]:
        return f"all {found['compared']} identical"
    return (
        f"{found['identical']} of {found['compared']} identical, {found['near_ties']} part at near ties, "
        f"{found['others']} elsewhere (largest margin {found['largest_margin']:.2f})"
    )


def _yes(good: bool) -> str:
    return "yes" if good else "NO"

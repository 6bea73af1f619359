"""The loop: capture log, curation, judging, registry and rollout. No torch at import except in judge/replay."""

"""Drafters and their training: torch, Accelerate, DeepSpeed. Knows snapshots and configs, not logs or engines."""

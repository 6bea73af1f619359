"""Replay of drafters on held-out requests, the statistics over it, and the gate's signed verdict."""

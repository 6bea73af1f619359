"""The embedded engine: batched speculative generation on one machine, with the real engines' capture and swap calls."""

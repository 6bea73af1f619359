"""Which vLLM releases are supported, and every name of vLLM's that differs between them: the one place to touch."""

from __future__ import annotations

SUPPORTED = ("0.32",)  # releases whose calls the tests of tests/engine have seen working

"""The plug-in for vLLM: captures finished requests and swaps drafters inside a running server, without a fork."""

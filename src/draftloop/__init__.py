"""draftloop keeps the drafter of a live LLM engine in step with the traffic that engine serves."""

__version__ = "0.1.0"

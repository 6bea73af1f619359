"""From a promoted version to a running engine: verify, stage, swap, probe, watch, commit or roll back."""

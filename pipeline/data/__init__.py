"""From a window of offsets to a frozen, curated, content-addressed snapshot."""

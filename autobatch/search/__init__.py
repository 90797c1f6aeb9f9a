"""The largest micro-batch that fits, found by replays and confirmed by runs."""

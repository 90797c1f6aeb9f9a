"""The largest micro-batch that fits."""

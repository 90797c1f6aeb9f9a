"""Benchmark of the training loop."""

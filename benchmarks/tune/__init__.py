"""Benchmarks of tuning: its result, its gain and its cost."""

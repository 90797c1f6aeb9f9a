"""Samples that differ in size: what real batches need, and how they are split."""

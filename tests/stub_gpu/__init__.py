"""Torch's own CUDA build on a machine without a GPU: stub libraries beneath it, and their environment."""

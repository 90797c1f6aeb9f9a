"""The trace of a training step on fake tensors."""

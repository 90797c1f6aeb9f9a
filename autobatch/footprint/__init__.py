"""The memory of a training step, predicted without running it."""

"""The allocator's model and predictions against what others measured and published on real GPUs."""

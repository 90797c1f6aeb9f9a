"""The training loop: which samples, in which order, the steps, the checkpoints and the figures."""

"""The check that splitting a batch does not change its gradient: before training, and on the first batch."""

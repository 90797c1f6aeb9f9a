"""Search for the fastest configuration and the best learning rate at a fixed target batch."""

"""The user's model, data and loss, and how samples are read."""

"""autobatch: the largest micro-batch that fits, and the batch you asked for, exactly."""

__version__ = "0.1.0"

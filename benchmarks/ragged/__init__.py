"""Samples of different sizes: the promise that a limit holds, and the time that a split by size saves."""

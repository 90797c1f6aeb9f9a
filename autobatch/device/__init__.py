"""Devices: their memory, the enforcement of a budget, and the memory that a step took."""

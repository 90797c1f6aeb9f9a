"""Checkpoints: written whole or not at all, and verified before they are loaded."""

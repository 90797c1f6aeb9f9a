"""Predictions for hardware that need not be here."""

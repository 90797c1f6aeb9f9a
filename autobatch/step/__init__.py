"""One optimizer step."""

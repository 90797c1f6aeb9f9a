"""Records, options, errors and units, which every layer uses. Never imports torch."""

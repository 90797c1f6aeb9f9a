"""What every layer uses: records, options, errors, units. Never imports torch."""

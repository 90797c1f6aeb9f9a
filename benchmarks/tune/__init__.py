"""What tuning finds, what it gains and what it costs."""

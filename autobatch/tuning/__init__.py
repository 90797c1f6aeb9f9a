"""What is left when the effective batch is fixed: what a configuration costs, and which to try next."""

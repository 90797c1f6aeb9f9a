"""autobatch for loops that are not its own: yours, and those of other libraries."""

"""Support for training loops that are not autobatch's: the user's own, and those of other libraries."""

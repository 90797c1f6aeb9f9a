"""Models of allocators, and the events that they replay."""

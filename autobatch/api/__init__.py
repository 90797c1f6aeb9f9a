"""The library calls, and the stages of each command in order."""

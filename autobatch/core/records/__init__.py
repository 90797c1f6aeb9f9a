"""Records of every stage; the JSON of the command line has the same names.

A figure that a device cannot give is None, never 0 or -1. Sizes are in bytes, times in seconds, counts in
samples. Nothing here imports torch, so a report can be read anywhere.
"""

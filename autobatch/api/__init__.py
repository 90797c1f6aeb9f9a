"""The library calls and the commands that train: the stages in order."""

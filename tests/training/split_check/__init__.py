"""Tests of `autobatch.training.split_check`."""

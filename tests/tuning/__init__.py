"""Tests of `autobatch.tuning`."""

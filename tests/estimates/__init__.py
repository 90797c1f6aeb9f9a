"""Tests of `autobatch.estimate`."""

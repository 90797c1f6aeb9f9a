"""Tests of `autobatch.cli`."""

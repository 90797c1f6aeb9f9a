"""Tests of `autobatch.probing`."""

"""Tests of `autobatch.probing.estimates`."""

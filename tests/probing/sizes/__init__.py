"""Tests of `autobatch.probing.sizes`."""

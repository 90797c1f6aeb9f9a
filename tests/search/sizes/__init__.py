"""Tests of `autobatch.search.sizes`."""

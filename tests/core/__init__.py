"""Tests of `autobatch.core`."""

"""Tests of `autobatch.step`."""

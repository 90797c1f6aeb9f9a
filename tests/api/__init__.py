"""Tests of `autobatch.api`."""

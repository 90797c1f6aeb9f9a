"""Tests of `autobatch.distributed`."""

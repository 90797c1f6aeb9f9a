"""Tests of `autobatch.footprint.tracing`."""

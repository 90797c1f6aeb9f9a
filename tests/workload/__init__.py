"""Tests of `autobatch.workload`."""

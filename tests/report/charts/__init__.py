"""Tests of `autobatch.report.charts`."""

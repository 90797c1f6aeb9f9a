"""Tests of `autobatch.device.allocator`."""

"""Tests of `autobatch.distributed.sharding`."""

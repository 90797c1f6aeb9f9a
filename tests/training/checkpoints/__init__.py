"""Tests of `autobatch.training.checkpoints`."""

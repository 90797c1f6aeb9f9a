"""Tests of `autobatch.integrations`."""

"""Tests of whole runs, across packages."""

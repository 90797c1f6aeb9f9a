"""The version of autobatch."""

__version__ = "0.1.0"

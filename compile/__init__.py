"""Trace, split, compile, seal, stitch and load."""

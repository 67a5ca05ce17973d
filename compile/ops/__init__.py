"""Serve the Artifact noun: splitting ops, and the state they reach while the stitched program runs."""

"""Artifact: passes over a piece's graph inside Inductor; one file per pass."""

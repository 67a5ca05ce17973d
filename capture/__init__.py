"""Sizes and capture plans."""

"""Serve the Artifact noun: built-in reference models, which are also examples of a server's model."""

"""Loading sealed pieces: no compiler imported."""

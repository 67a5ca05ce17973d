"""Key, store and manifest. Imports no torch."""

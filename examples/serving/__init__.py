"""Serve: a small continuous-batching server over ``pwcc.load`` and ``GraphRunner``; see ``serve.py``."""

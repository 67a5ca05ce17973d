"""pwcc: compile a PyTorch model piecewise once, load it elsewhere with nothing compiled.

Importing the package is cheap: torch is imported by the first attribute that needs it.
"""

__version__ = "0.1.0"

"""Artifact: operators that do in one kernel what FP8 layers do in several; importing them registers them.

``register.py`` holds names and schemas, ``formulas.py`` what each computes, ``kernels.py`` the Triton
kernels, ``launch.py`` their eager launches and the tiles.
"""

from pwcc.compile.ops.fused.register import OPERATORS

__all__ = ["OPERATORS"]

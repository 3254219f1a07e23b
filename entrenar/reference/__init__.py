"""The oracles: every op in plain NumPy, obviously right, in the precision of its inputs.

Same file names, function names and argument order as ``entrenar.kernels``, less ``stream``; no code
in common with it.
"""

"""Decides whether an answer is correct: mathematics, units, instructions, and the pool of verifier processes.

Level 2: imports ``runtime.system`` only and loads no model. At most 3,020 lines.
"""

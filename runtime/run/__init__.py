"""A run and its directory: checks before it starts, name, log, checkpoints, saved models, diagnosis and verdict.

Level 5: imports levels 1 to 4 but not ``runtime.engine``.
"""

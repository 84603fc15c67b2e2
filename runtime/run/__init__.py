"""A run and its directory: checks before it starts, name, log, checkpoints, saved models, diagnosis and verdict.

Level 4: imports levels 1 to 3 but not ``runtime.engine``.
"""

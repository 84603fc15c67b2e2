"""The sampling engine: in a thread or on ranks of its own, its settings, and the weight push.

Level 5: imports levels 1 to 4 but not ``runtime.run``.
"""

"""The sampling engine: in a thread or on ranks of its own, its settings, and the weight push.

Level 4: imports levels 1 to 3 but not ``runtime.run``.
"""

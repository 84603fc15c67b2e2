"""The sampling engine: in a thread, in its own process or on its own ranks, its settings, and the weight push.

Level 4: imports levels 1 to 3 but not ``runtime.run``.
"""

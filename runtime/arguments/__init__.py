"""The command line: flags, presets, checks of their values, and other frameworks' names for them.

Level 3: imports ``runtime.system`` only and loads no model.
"""

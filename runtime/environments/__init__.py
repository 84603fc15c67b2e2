"""Responses of several turns: episodes, the user's environment objects, chat turns and tool calls.

Level 3: imports ``runtime.data`` and the levels below, and knows nothing about runs.
"""

"""Responses of several turns: episodes, the user's environment objects, chat turns and tool calls.

Level 6: loaded by name with --environment; no package imports it. It imports the levels below.
"""

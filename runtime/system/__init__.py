"""Processes and signals, worker processes, the watchdog, sockets, redaction and git.

Level 1: imports nothing else of this project and knows nothing about models or training.
"""

"""Graders decide whether an answer is right. Each imports ``runtime.system`` alone, and is loaded by name."""

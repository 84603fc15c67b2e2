"""Decide whether a response is right: mathematics, programs and instructions. Each grader is loaded by name."""

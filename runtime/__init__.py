"""What keeps a run alive and is not the algorithm."""

"""Everything that a run needs and that is not the algorithm, in seven packages on five levels."""

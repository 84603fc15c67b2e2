"""Everything that a run needs and that is not the algorithm, in eight packages on five levels."""

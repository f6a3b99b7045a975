"""Step `eval`: benchmarks on weights, within a run or outside of all runs."""

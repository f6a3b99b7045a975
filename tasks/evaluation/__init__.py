"""`eval`: benchmarks on weights, beside a run or apart from all."""

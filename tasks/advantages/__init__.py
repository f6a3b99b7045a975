"""From rewards to advantages: the step, and one estimator a file."""

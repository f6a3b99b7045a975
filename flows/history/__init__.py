"""Go back over committed steps: fork, replay, rescore, what-if, diff."""

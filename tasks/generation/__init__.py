"""Step `rollout`: generation of the samples of a shard."""

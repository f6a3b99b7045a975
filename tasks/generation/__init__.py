"""`rollout`: generate the samples of a shard."""

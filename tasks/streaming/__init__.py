"""What a run whose `rollout.pipeline` is `streaming` does in place of a rollout that begins and ends."""

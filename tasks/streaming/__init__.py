"""Steps and threads of a run with `rollout.pipeline: streaming`, in place of a rollout that begins and ends."""

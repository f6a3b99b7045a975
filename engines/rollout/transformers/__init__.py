"""The rollout engine that runs any Hugging Face causal language model in its own process."""

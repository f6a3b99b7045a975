"""How weights reach rollout engines."""

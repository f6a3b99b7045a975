"""An environment of `verifiers`, played by the policy that Cairn trains."""

"""An environment of `verifiers`, run with the policy that Cairn trains."""

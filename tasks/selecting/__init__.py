"""The step `filter`, which selects the groups to train on, and the policies that it uses."""

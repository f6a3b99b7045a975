"""What a model folder says, and how it is loaded."""

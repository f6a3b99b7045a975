"""What a sample's code is given: episodes, tools, capture, environments, generation."""

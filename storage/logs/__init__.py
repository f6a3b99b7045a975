"""What is durable before a commit."""

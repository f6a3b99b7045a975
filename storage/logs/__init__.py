"""Logs that make samples, calls and answers durable before a commit."""

"""Durable steps: code that makes a step happen exactly once."""

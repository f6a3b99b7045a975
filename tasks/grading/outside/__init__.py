"""Graders that ask something outside: a service, a model, a sandbox."""

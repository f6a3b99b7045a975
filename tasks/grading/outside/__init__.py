"""Graders that call something outside: a service, a model, a sandbox."""

"""Recipes made from the launch scripts and configurations of slime, verl and TRL."""

"""Estimates of parameters, memory and time that a model needs, from its shape and a layout, before it is loaded."""

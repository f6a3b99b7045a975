"""The driver of a run: checks, data sources and engines before it begins; gates, preemption and divergence while it
runs."""

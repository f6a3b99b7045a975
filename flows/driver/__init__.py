"""The driver of a run: checks, sources and engines before it begins; gates, notices and divergence on its way."""

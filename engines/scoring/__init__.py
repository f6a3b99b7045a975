"""Scoring: log-probs of tokens from a model that a server holds, and scores of responses from a reward model."""

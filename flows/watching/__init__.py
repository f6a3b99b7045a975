"""Watchers of a run, which receive its events: progress in the terminal, alarms, trackers, and their delivery."""

"""Who watches a run while it works, and takes its events: progress in the terminal, alarms, and what carries them."""

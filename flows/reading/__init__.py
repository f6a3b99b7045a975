"""Views of ledgers for people and programs. Nothing here writes or starts anything."""

"""The code around one sample: episodes, tools, capture, environments and generate functions."""

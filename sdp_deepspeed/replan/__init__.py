"""The state of a live run on its way to the ranks that have it under another plan."""

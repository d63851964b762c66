"""Models that are built without storage."""

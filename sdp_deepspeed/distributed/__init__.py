"""Process groups as objects, and how ranks agree."""

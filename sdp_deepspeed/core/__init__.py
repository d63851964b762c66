"""The second edition's core, beside the rooms that it replaces: masking, and the exchange over groups of holders."""

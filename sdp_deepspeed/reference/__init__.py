"""The method executed literally, and its theory: the oracle."""

"""Reference implementation of the method, for tests, and its theory."""

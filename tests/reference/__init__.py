"""Reference implementation of the method, for tests."""

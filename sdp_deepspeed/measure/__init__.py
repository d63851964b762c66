"""Bytes and traffic of a live engine."""

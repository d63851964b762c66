"""Bytes and traffic by count, before anything runs."""

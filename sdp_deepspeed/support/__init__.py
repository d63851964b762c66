"""What works together: one table, from which start-up refuses."""

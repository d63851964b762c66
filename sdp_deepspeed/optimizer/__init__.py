"""The wrapped optimizer: what it averages, steps and sends back."""

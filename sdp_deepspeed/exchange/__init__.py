"""Masked averages of gradients over the holders, and weights on their way back."""

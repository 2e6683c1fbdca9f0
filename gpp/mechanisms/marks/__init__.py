"""Operators of a stage that are computed again, or whose activations are on the host meanwhile."""

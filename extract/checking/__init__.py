"""Comparing programs with the eager model."""

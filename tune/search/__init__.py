"""Races, descents and what decides between their winners."""

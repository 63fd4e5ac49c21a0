"""Rewritten programs to programs with forms: which steps become one region, and each region's canonical form."""

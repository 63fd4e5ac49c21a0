"""From a program and a replay table to prepared steps that run."""

"""The database of measurements: what it holds, by which keys, and how it survives."""

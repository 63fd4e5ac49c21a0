"""Child processes that may crash or hang, and what they may answer."""

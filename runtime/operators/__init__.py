"""Which operators may be called, how, and replaying tuned ones inside other code."""

"""From a model to a graph: building without weights, tracing, and reading what was traced."""

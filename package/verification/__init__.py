"""The checks behind `tune-model verify`: kernels against float64, the whole program against the model it came from.

Runs the artifact's machine code and, for the original model, the tracer's builders; so it needs what tuning needs, and
the loader imports none of it.
"""

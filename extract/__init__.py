"""From a model to programs and tasks: tracing, rewriting, grouping into regions, binding the workload.

Nothing here builds or times a kernel.
"""

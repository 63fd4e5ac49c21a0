"""From tasks to choices: candidates, builds, correctness checks, measurements, search and records.

Nothing here knows where a task came from or how an artifact is laid out.
"""

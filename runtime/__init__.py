"""The leaf every room and every server shares: programs, kernels with launch facts, and what runs them.

Imports torch and nothing of ours. Compilers, tracers and model libraries have no place here: a server that runs an
artifact imports this room with none of them installed.
"""

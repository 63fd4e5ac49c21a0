"""The CUDA candidates' kernels: Triton source, what is generated around it, and the ahead-of-time compiler.

Nothing here runs on a device; a build needs Triton and no driver. Import `triton` only inside functions, except in
`kernels/`: the families' lists of configurations are read on machines without it.
"""

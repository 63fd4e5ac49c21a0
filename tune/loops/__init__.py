"""One loop form for everything that is not a matmul: ATen bodies become index spaces with SSA nodes.

Triton and C++ are printed from it (`tune/triton`, `tune/cpp`), so what an operator means is decided here, once.
"""

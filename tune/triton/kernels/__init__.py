"""Triton kernels as ordinary `@triton.jit` functions: readable, and testable in Triton's interpreter.

A kernel ends in an *epilogue*, a generated `@triton.jit` function passed as a constexpr that loads its own operands and
stores the results, so kernels know nothing of what is fused behind them.
"""

"""The parts of `benchmarks/matmul.py`: which shapes, how they are tuned and timed, what is made of the rows."""

"""The parts of `benchmarks/reductions.py`: which operations and shapes, the peers, what is made of the rows."""

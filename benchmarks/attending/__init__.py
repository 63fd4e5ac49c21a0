"""The parts of `benchmarks/attention.py`: forms and shapes, the peers, what is made of the rows."""

"""Parts of `benchmarks/reliability.py`: each tries to make the tuner lose work or lie."""

"""What `benchmarks/serving.py` measures: whole models as a server runs them, beside what their users have today."""

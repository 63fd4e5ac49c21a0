"""Machine code: loading it and calling it, on CUDA and on a CPU."""

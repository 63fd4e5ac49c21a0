"""C++ for CPUs: printed from the loop form, compiled by g++ into shared libraries, with two hand-written headers."""

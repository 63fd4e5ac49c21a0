"""Kernels run in Triton's interpreter only in a process of their own: the mode is fixed when Triton is imported."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]

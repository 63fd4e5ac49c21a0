"""The artifact on disk: its layout, the writer, and the loader that checks it and hands it to `runtime`.

Loading imports no compiler, tracer or model library.
"""

"""The artifact on disk: its layout, the writer, and the loader that checks it and hands it to `runtime`.

Loading imports no compiler, tracer or model library; importing this package not even torch.
"""

from tune_model.package.load import load

__all__ = ["load"]

"""Let a model that is there already, one of transformers above all, run on tuned programs behind its own `forward`."""

from tune_model.package.attach.attachment import Attachment, attach

__all__ = ["Attachment", "attach"]

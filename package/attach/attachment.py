"""`attach`: put tuned programs behind a module's own `forward`, and count what they do not answer."""

import functools
import inspect
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tune_model.extract.request import TransformersSource
from tune_model.package.attach.matching import Unmatched
from tune_model.package.attach.structure import Structure
from tune_model.package.load import start
from tune_model.package.parts import part_for_device
from tune_model.package.read import Artifact, open_artifact
from tune_model.package.signature import read_verify_key
from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tune_model.runtime.tuned import TunedModel

__all__ = ["Attachment", "NotAnsweredError", "OtherModelError", "attach"]

Calls = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class OtherModelError(TuneModelError):
    """The module is another model than the one the artifact was tuned for."""


class NotAnsweredError(TuneModelError):
    """A strict attachment was called in a way that no tuned program answers."""

    exit_code = 4


class _Forward:
    """The `forward` of one module object. Copies of the module, unpickled ones too, get their class's own.

    A function would be shared with copies, which would then compute with this module's weights.
    """

    def __init__(self, module: "nn.Module", call: Callable[..., Any], original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._module = module
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the copy, which has no attributes yet: the method of its class.
        return getattr, (self._module, "forward")


class Attachment:
    """Tuned programs behind a module's `forward`.

    The module may be called from several threads as before, each with a cache object of its own, on any stream.

    Args:
        module: Gets an attribute `forward` of its own, which hides its class's, or replaces one that it has already;
            nothing else of it changes.
        tuned: Computes.
        calls: Answers those calls that it can.
        strict: Raise instead of running the original.
    """

    def __init__(self, module: "nn.Module", tuned: "TunedModel", calls: Calls, *, strict: bool) -> None:
        self.module = module
        self.tuned = tuned
        self._calls = calls
        self._strict = strict
        self._lock = threading.Lock()
        self._answered = 0
        self._unmatched: Counter[str] = Counter()
        self._own = vars(module).get("forward")
        self._structure = Structure(module)
        self._installed = _Forward(module, self.call, module.forward)
        module.forward = self._installed

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of the module's `forward`.

        Raises:
            NotAnsweredError: The tuned programs cannot, and the attachment is strict.
        """
        import torch

        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self._run_original(args, kwargs)
        try:
            self._structure.check()
            self.tuned.check_weights()
            answer = self._calls(args, kwargs)
        except Unmatched as reason:
            with self._lock:
                self._unmatched[str(reason)] += 1
            if self._strict:
                raise NotAnsweredError(f"{reason}; the tuned programs do not answer such a call") from None
            return self._run_original(args, kwargs)
        with self._lock:
            self._answered += 1
        return answer

    def _run_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._own is not None:
            return self._own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def answered(self) -> int:
        """How many calls the tuned programs answered."""
        return self._answered

    def unmatched(self) -> Mapping[str, int]:
        """Return why calls ran the original instead, and how often."""
        with self._lock:
            return dict(self._unmatched.most_common())

    def detach(self) -> None:
        """Give the module its own `forward` back. Parameters stay where they are."""
        if vars(self.module).get("forward") is not self._installed:
            return
        if self._own is None:
            del self.module.forward
        else:  # somebody had put it there before
            self.module.forward = self._own


def attach(
    module: "nn.Module",
    artifact: str | os.PathLike[str],
    *,
    strict: bool = False,
    graphs: bool = True,
    verify_key: str | os.PathLike[str] | None = None,
) -> Attachment:
    """Let a model's calls run on its tuned programs.

    A transformers model's `generate` keeps working, as does every other use: calls that the programs do not answer
    (training, another kind of cache, logits of every position) run the original and are counted. The model's parameters
    become views of the merged weights, so that they are not held twice; weights in a library's own layout are.

    Args:
        module: The model the artifact was tuned for, in evaluation mode, with its weights, on its device.
        artifact: A folder or a file; of a bundle, the part for the module's device.
        strict: Raise `NotAnsweredError` instead of running the original.
        graphs: Replay decode steps and repeated shapes as CUDA graphs.
        verify_key: A file with the public key that the artifact must be signed by.

    Returns:
        What counts calls, and detaches.

    Raises:
        SignatureError: The artifact is not signed by the key.
        ArtifactError: The artifact is damaged, foreign or of another version.
        OtherMachineError: Its kernels cannot run here.
        OtherModelError: The module is another model, or runs on an artifact already.
        WeightError: Its weights do not fit.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise OtherModelError(f"{artifact}: attached to a {type(module).__name__}; expected a torch.nn.Module")
    if isinstance(module, torch.jit.ScriptModule):
        raise OtherModelError(
            f"{artifact}: attached to a scripted module; expected the torch.nn.Module it was made from"
        )
    if isinstance(vars(module).get("forward"), _Forward):
        raise OtherModelError(f"{artifact}: the module runs on an artifact already; expected to be detached first")
    key = None if verify_key is None else read_verify_key(verify_key)
    device = _device_of(module)
    opened = open_artifact(artifact, None if device is None else part_for_device(device), key)
    if device is None:
        raise OtherModelError(f"{opened.path}: the module has no parameters; expected the model it was tuned for")
    _check_model(opened, module)
    with torch.no_grad():
        tuned = start(opened, module, device, graphs=graphs, share=True)
    return Attachment(module, tuned, _calls(opened, module, tuned), strict=strict)


def _device_of(module: "nn.Module") -> "torch.device | None":
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), None)


def _calls(artifact: Artifact, module: "nn.Module", tuned: "TunedModel") -> Calls:
    from tune_model.package.attach.decoder import DecoderCalls
    from tune_model.package.attach.forward import ForwardCalls

    signature = inspect.signature(module.forward)
    if artifact.manifest.request.task == "causal-lm":
        return DecoderCalls(module, tuned, signature)
    named = isinstance(artifact.manifest.request.source, TransformersSource)
    return ForwardCalls(module, tuned, signature, named=named)


# What a configuration says about use and origin, not about what is computed.
_NOT_COMPUTED = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "chunk_size_feed_forward",
        "dtype",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def _check_model(artifact: Artifact, module: "nn.Module") -> None:
    """Compare dtype and configuration; names and shapes of weights are compared when they are bound.

    Raises:
        OtherModelError: Something that is computed differs.
    """
    request = artifact.manifest.request
    wanted = f"torch.{request.dtype}"
    seen = {str(p.dtype) for p in module.parameters() if p.is_floating_point()}
    if seen and wanted not in seen:
        raise OtherModelError(f"{artifact.path}: was tuned for {wanted}; the module is {', '.join(sorted(seen))}")
    config: Any = getattr(module, "config", None)
    if not isinstance(request.source, TransformersSource) or not hasattr(config, "to_dict"):
        return
    from tune_model.extract.tracing.build import load_config

    expected: dict[str, Any] = load_config(request.source).to_dict()
    actual: dict[str, Any] = config.to_dict()
    for name in sorted(expected.keys() & actual.keys() - _NOT_COMPUTED):
        if not name.endswith("_token_id") and expected[name] != actual[name]:
            wanted, seen_here = expected[name], actual[name]
            raise OtherModelError(f"{artifact.path}: was tuned for {name} {wanted!r}; the module has {seen_here!r}")

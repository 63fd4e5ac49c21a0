"""Builds models without memory for their weights: parameters are fake CPU tensors, buffers hold real values.

Parameters move to the meta device as modules register them, so a constructor computes its buffers (rotary frequencies,
position ids) for real, while an 8-billion-parameter model takes seconds and no memory. Fake tensors replace the meta
ones for tracing: plain meta tensors lose constants that `forward` makes on its input's device.
"""

import copy
import difflib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from tune_model.extract.request import FactorySource, TransformersSource
from tune_model.extract.tracing.front_end import SourceError, UnknownAttentionError
from tune_model.runtime.weights.dense import not_dense

__all__ = [
    "Built",
    "build_factory",
    "build_real",
    "build_transformers",
    "first_line",
    "load_config",
    "make_fake",
    "parameters_on_meta",
    "torch_dtype",
    "weight_names",
]

_log = logging.getLogger(__name__)

_SHOWN = 300
"""Characters of a foreign error that are shown."""

_NEARLY = 0.85
"""How alike two names must be, as difflib counts, for one to be a slip for the other: `num_hiden_layers`."""

_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
"""Where torch has modules whose weights are packed integers."""

_AUTO_CLASSES = {"causal-lm": "AutoModelForCausalLM", "encoder": "AutoModel", "forward": "AutoModel"}


class Built(NamedTuple):
    """A model ready to be traced.

    Attributes:
        module: In eval mode; parameters are fake CPU tensors.
        mode: The fake mode they belong to; inputs must be made in it.
    """

    module: torch.nn.Module
    mode: FakeTensorMode


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called `name`.

    Raises:
        SourceError: There is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SourceError(f"dtype is {name!r}; expected one of torch's, such as float32, bfloat16 or float16")
    return dtype


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Make every parameter that a module registers a meta tensor; buffers stay real."""

    def move(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter | None) -> torch.nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type] # torch's annotation is wrong
    try:
        yield
    finally:
        handle.remove()


def make_fake(module: torch.nn.Module) -> Built:
    """Replace meta parameters and persistent buffers by fake CPU tensors, tied ones by the same one, in place."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        found = made.get(id(tensor))
        if found is None:
            with mode:
                found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, torch.nn.Parameter):
                found = torch.nn.Parameter(found, requires_grad=False)
            made[id(tensor)] = found
        return found

    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = fake(parameter)  # type: ignore[assignment]
        for name, buffer in child._buffers.items():
            if buffer is not None and (buffer.is_meta or name not in child._non_persistent_buffers_set):
                child._buffers[name] = fake(buffer)
    return Built(module.eval(), mode)


def weight_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the checkpoint name of every parameter and persistent buffer; tied ones share the name that is saved.

    transformers says which of a tied group is the source; elsewhere it is the first in registration order.
    """
    sources = {str(s) for s in (getattr(module, "all_tied_weights_keys", None) or {}).values()}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    saved: dict[int, str] = {}
    for name, tensor in tensors:
        if id(tensor) not in saved or (name in sources and saved[id(tensor)] not in sources):
            saved[id(tensor)] = name
    return {name: saved[id(tensor)] for name, tensor in tensors}


# ------------------------------------------------------------------------------------------------------- transformers


def load_config(source: TransformersSource) -> Any:
    """Return the transformers configuration of a source.

    Raises:
        SourceError: The folder has no config.json, the model type is unknown, transformers refuses a field, or the
            weights are quantised.
    """
    config = _load_config(source)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        fields = quantised if isinstance(quantised, Mapping) else {}
        stored = fields.get("quant_method") or getattr(quantised, "quant_method", "other numbers")
        raise SourceError(
            f"its quantization_config says that the weights are stored as {stored}, which are not the weights that are"
            " traced; expected a model in float32, float16 or bfloat16 (for a checkpoint that was converted back, leave"
            " quantization_config out)"
        )
    return config


def _load_config(source: TransformersSource) -> Any:
    from transformers import AutoConfig

    if (source.folder is None) == (source.config is None):
        raise SourceError("a transformers model needs exactly one of a folder and an inline config")
    if source.folder is not None:
        path = Path(source.folder)
        if not (path / "config.json").is_file():
            raise SourceError(f"{path} has no config.json; expected the folder of a saved transformers model")
        return _checked(lambda: AutoConfig.from_pretrained(str(path), local_files_only=True), f"{path / 'config.json'}")
    fields = dict(source.config or {})
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str):
        raise SourceError("the inline model config has no model_type; expected one such as llama or bert")
    _check_model_type(model_type)
    config = _checked(lambda: AutoConfig.for_model(model_type, **fields), f"the {model_type} config")
    _check_spelling(fields, type(config))
    return config


def _check_spelling(fields: Mapping[str, Any], kind: Any) -> None:
    """Refuse a field that nothing reads and that is nearly one that is read: transformers keeps it, without effect.

    Raises:
        SourceError: There is one.
    """
    try:
        known = {*kind().to_dict(), *kind.attribute_map}
    except Exception:  # noqa: BLE001 -- a configuration without defaults has no list of its fields
        return
    for name in fields:
        near = difflib.get_close_matches(name, known - fields.keys(), n=1, cutoff=_NEARLY)
        if name not in known and not hasattr(kind, name) and near and near[0].strip("_") != name.strip("_"):
            raise SourceError(f"{name} is no field of transformers' {kind.__name__} (did you mean {near[0]}?)")


def _check_model_type(model_type: str) -> None:
    """Refuse a type that transformers does not know, naming the near ones; its own error lists hundreds."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = list(CONFIG_MAPPING.keys())
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=3)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise SourceError(
            f"transformers {transformers.__version__} knows no model type {model_type!r}; expected one of its"
            f" {len(known)} types, such as llama or bert{hint}"
        )


def _checked(load: Callable[[], Any], what: str) -> Any:
    try:
        return load()
    except Exception as error:  # the config classes raise whatever their fields' validation raises
        raise SourceError(f"{what} was refused by transformers: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """Return what an error of transformers says; of a KeyError that is the key alone."""
    return f"{type(error).__name__}: {first_line(error)}" if isinstance(error, LookupError) else first_line(error)


def first_line(error: BaseException) -> str:
    """Return what an error of a library or of the user's code says, in one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def model_class(source: TransformersSource, config: Any, task: str) -> Any:
    """Return the class to build: the one named, else for `forward` the config's own, else the task's auto class.

    Raises:
        SourceError: transformers has no such class.
    """
    import transformers

    name = source.architecture
    if name is None and task == "forward":
        name = next(iter(config.architectures or ()), None)
    if name is None:
        return _auto_class(getattr(transformers, _AUTO_CLASSES[task]), config, task)
    found = getattr(transformers, name, None)
    if found is None:
        raise SourceError(
            f"the model class {name!r} is not in this transformers; expected one such as LlamaForCausalLM"
        )
    return found


def _auto_class(cls: Any, config: Any, task: str) -> Any:
    """Return the auto class if it has a model for the configuration; its own error lists all those it has."""
    if type(config) not in cls._model_mapping:
        raise SourceError(
            f"transformers has no {cls.__name__} for {config.model_type}, so it cannot be a {task} model; expected"
            " another task, or a model class in architecture"
        )
    return cls


def build_transformers(
    source: TransformersSource, config: Any, task: str, dtype: str, attention: str
) -> torch.nn.Module:
    """Build a transformers model with parameters on meta and real buffers.

    Args:
        source: Names the class.
        config: From `load_config`.
        task: Picks the class where the source names none.
        dtype: Of the parameters.
        attention: Name of the attention implementation; registered by the caller.

    Raises:
        SourceError: transformers cannot build it.
        UnknownAttentionError: It does not take this attention.
    """
    with parameters_on_meta():
        return _construct(model_class(source, config, task), config, dtype, attention)


def build_real(source: TransformersSource, config: Any, task: str, *, at_most: int) -> torch.nn.Module | None:
    """Build a float32 transformers model with memory, running transformers' own eager attention.

    Args:
        source: Names the class.
        config: From `load_config`, or a smaller one.
        task: Picks the class where the source names none.
        at_most: Parameters it may have.

    Returns:
        `None` when it has more.

    Raises:
        SourceError: transformers cannot build it.
    """
    cls = model_class(source, config, task)
    with parameters_on_meta():
        size = sum(p.numel() for p in _construct(cls, config, "float32", "eager").parameters())
    return None if size > at_most else _construct(cls, config, "float32", "eager")


def _construct(cls: Any, config: Any, dtype: str, attention: str) -> torch.nn.Module:
    build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    try:
        with torch.no_grad():
            # transformers notes the attention in the config it is given.
            model = build(copy.deepcopy(config), dtype=torch_dtype(dtype), attn_implementation=attention)
    except (KeyError, ValueError) as error:
        if error.args == (attention,) or "attention" in str(error).lower():
            raise UnknownAttentionError(
                f"{config.model_type} does not take the attention implementation {attention!r}: it keeps its own"
                " attention classes, so its attention cannot be recognised; expected a model that transformers runs"
                " with any attention implementation"
            ) from error
        raise SourceError(f"transformers could not build {cls.__name__}: {_said(error)}") from error
    except Exception as error:  # model constructors raise whatever their code raises
        raise SourceError(
            f"transformers could not build {cls.__name__} from the {config.model_type} config: {_said(error)}"
        ) from error
    return model.eval()  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------- factories


def build_factory(source: FactorySource, dtype: str, *, real: bool = False) -> torch.nn.Module:
    """Call a factory and convert its module to a dtype.

    Args:
        source: `package.module:callable` and where to import it from.
        dtype: Real floating-point parameters and buffers are converted to it; complex ones stay as they are.
        real: Keep real parameters; otherwise they are on meta.

    Raises:
        SourceError: It cannot be imported or called, or returns something else than a module with dense weights: a
            scripted or quantised one, or one whose lazy parameters have no shape yet.
    """
    module_name, _, attribute = source.factory.partition(":")
    if not module_name or not attribute:
        raise SourceError(f"factory is {source.factory!r}; expected package.module:callable")
    with ExitStack() as stack:
        if source.search_path is not None:
            if not Path(source.search_path).is_dir():
                raise SourceError(f"the factory's search path {source.search_path} is not a folder")
            sys.path.insert(0, source.search_path)
            stack.callback(sys.path.remove, source.search_path)
            importlib.invalidate_caches()
        try:
            factory = importlib.import_module(module_name)
            for part in attribute.split("."):
                factory = getattr(factory, part)
        except (Exception, SystemExit) as error:  # importing runs the user's code
            raise SourceError(f"the factory {source.factory} could not be imported: {first_line(error)}") from error
        if not callable(factory):
            raise SourceError(f"the factory {source.factory} is a {type(factory).__name__}; expected a callable")
        if not real:
            stack.enter_context(parameters_on_meta())
        try:
            with torch.no_grad():
                made = factory()
        except (Exception, SystemExit) as error:  # the user's code
            raise SourceError(
                f"the factory {source.factory} failed: {type(error).__name__}: {first_line(error)}"
            ) from error
    if not isinstance(made, torch.nn.Module):
        raise SourceError(f"the factory {source.factory} returned a {type(made).__name__}; expected a torch.nn.Module")
    title = f"the factory {source.factory}"
    _check_plain(made, title)
    wanted = torch_dtype(dtype)
    try:
        # `Module.to` would make complex tensors real.
        made._apply(lambda tensor: tensor.to(wanted) if tensor.is_floating_point() else tensor)
        return made.eval()
    except Exception as error:  # modules may do anything in `to` and `eval`
        hint = " (save a program of torch.export as .pt2, for source: pt2)" if isinstance(made, GraphModule) else ""
        raise SourceError(
            f"{title} returned a {type(made).__name__} that cannot be brought to {dtype} and evaluation mode:"
            f" {type(error).__name__}: {first_line(error)}{hint}"
        ) from error


def _check_plain(module: torch.nn.Module, title: str) -> None:
    """Refuse what torch.export cannot look into, and weights that no program can read.

    Raises:
        SourceError: A part is scripted or quantised, or a parameter is lazy or not dense.
    """
    for path, child in module.named_modules():
        cls = type(child)
        part = f"a module whose {path} is a" if path else "a"
        if isinstance(child, torch.jit.ScriptModule):
            raise SourceError(
                f"{title} returned {part} {cls.__name__}; scripted and traced modules are not supported: expected the"
                " plain torch.nn.Module, before torch.jit"
            )
        if cls.__module__.startswith(_QUANTISED):
            raise SourceError(
                f"{title} returned {part} {cls.__module__}.{cls.__name__}; quantised modules are not supported:"
                " expected the module before it was quantised"
            )
        saved = ((n, b) for n, b in child._buffers.items() if n not in child._non_persistent_buffers_set)
        for name, tensor in (*child._parameters.items(), *saved):
            seen = None if tensor is None else not_dense(tensor)
            if seen is not None:
                wanted = "a dense tensor (torch.strided)"
                if is_lazy(tensor):
                    wanted = "it to be initialised: call the module once with a sample input before returning it"
                inner = f"{path}.{name}" if path else name
                raise SourceError(f"{title} returned a module whose {inner} is {seen}; expected {wanted}")

"""Calls of models with one program: encoders, vision models, modules of any kind."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tune_model.package.attach.matching import Unmatched, check_settings, check_use, output_class, same
from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.tuned import TunedModel

__all__ = ["ForwardCalls"]


class ForwardCalls:
    """Answers calls of a module's `forward` with the program `forward`.

    Args:
        module: Whose calls.
        tuned: Has the program.
        signature: Of the original `forward`.
        named: The module returns an output of transformers; otherwise what its outputs' names say.
    """

    def __init__(self, module: nn.Module, tuned: TunedModel, signature: inspect.Signature, *, named: bool) -> None:
        self._module = module
        self._tuned = tuned
        self._signature = signature
        self._program = tuned.programs["forward"]
        self._inputs = [item.name for item in self._program.inputs]
        names = [output.name for output in self._program.outputs]
        self._output = output_class(module, names) if named else None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call.

        Raises:
            Unmatched: The program does not compute what is asked for.
        """
        given = self._given(args, kwargs)
        tensors = [t for t in given.values() if isinstance(t, Tensor)]
        check_use(self._module, tensors, self._tuned.device.type)
        inputs = self._bind(given)
        try:
            outputs = self._tuned.run("forward", inputs)
        except InputError as error:
            raise Unmatched(str(error)) from error
        return self._answer(outputs, return_dict=given.get("return_dict") is not False)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the call's arguments by name, those that were left out missing."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise Unmatched(str(error)) from error
        given: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                given.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise Unmatched(f"positional arguments beyond {name}")
            else:
                given[name] = value
        return given

    def _bind(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        others = {name: value for name, value in given.items() if name not in self._inputs}
        kinds = others.pop("token_type_ids", None)
        if kinds is not None and not same(kinds, torch.zeros_like(kinds)):
            raise Unmatched("token_type_ids are not all 0")
        check_settings(others)
        inputs: dict[str, Tensor] = {}
        for name in self._inputs:
            value = given.get(name)
            if value is None and name == "attention_mask" and isinstance(given.get("input_ids"), Tensor):
                value = torch.ones_like(given["input_ids"])
            if not isinstance(value, Tensor):
                raise Unmatched(f"{name} is missing")
            inputs[name] = value
        return inputs

    def _answer(self, outputs: dict[str, Tensor], *, return_dict: bool) -> Any:
        if self._output is not None:
            made = self._output(**outputs)
            return made if return_dict else made.to_tuple()
        names = list(outputs)
        if names == ["output"]:
            return outputs["output"]
        if all(re.fullmatch(r"output_\d+", name) for name in names):
            return tuple(outputs.values())
        return outputs

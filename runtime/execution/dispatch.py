"""Choose the kernel for every form a plan applies: the replay table's rule, with the weights' layouts as they are."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tune_model.runtime.coverage import NotTunedError
from tune_model.runtime.execution.binding import body_kernel, prepare_kernel
from tune_model.runtime.execution.emission import PreparedKernel
from tune_model.runtime.execution.invoke import ProgramError
from tune_model.runtime.kernel import Kernel, LibraryMatmul
from tune_model.runtime.launch.counters import LentCounters
from tune_model.runtime.launch.cublaslt import installed_version
from tune_model.runtime.launch.machine_code import CodeLoader
from tune_model.runtime.program import Call, Form, Pack, Transpose, Weight, bind_form
from tune_model.runtime.replay import Entry, Replay, Selection, select, slot_sizes

__all__ = ["Choice", "Dispatcher", "Site", "fits", "form_label", "nearest_entry", "weight_layout"]


class Site(NamedTuple):
    """What a choice depends on.

    Attributes:
        form: Fingerprint.
        dims: Value of each of the form's dims.
        layouts: Layout of each weight slot that has one.
        addresses: Address of each weight and cache slot, modulo 256: what alignment needs. Nothing moves those;
            activations are copied to where a kernel wants them.
    """

    form: str
    dims: tuple[int, ...]
    layouts: tuple[tuple[str, str], ...]
    addresses: tuple[tuple[str, int], ...]


class Choice(NamedTuple):
    """What runs at a site."""

    kernel: PreparedKernel
    selection: Selection
    nearest: Entry | None


def weight_layout(weight: Weight) -> str | None:
    """Return the layout in which a weight is kept; `None` for the checkpoint's own."""
    layout = None
    for transform in weight.transforms:
        if isinstance(transform, Pack):
            layout = transform.layout
        elif isinstance(transform, Transpose):
            layout = None if layout == "transposed" else "transposed"
    return layout


def form_label(form: Form) -> str:
    """Name a form for people: its kind and operators."""
    return f"{form.kind} {'+'.join(call.op.split('.')[1] for call in form.body)}"


def fits(kernel: Kernel, layouts: Mapping[str, str], *, elsewhere: bool = False) -> bool:
    """Tell whether a kernel reads its weights in the layouts they have, and its library calls mean what they meant.

    Operators read a transposed weight as they read any tensor; launches have its strides built in.

    Args:
        kernel: To run.
        layouts: Of its weights, those that are not the checkpoint's own.
        elsewhere: It is asked for another machine: a library that this one lacks is taken for the one that it means.
    """
    versions = {step.version for step in kernel.steps if isinstance(step, LibraryMatmul)}
    if versions and versions != {installed_version() or (next(iter(versions)) if elsewhere else None)}:
        return False
    if dict(kernel.layouts) == layouts:
        return True
    strided = not kernel.layouts and set(layouts.values()) == {"transposed"}
    return strided and all(isinstance(step, Call) for step in kernel.steps)


class Dispatcher:
    """Chooses and prepares kernels, each once; not safe to share between threads without a lock.

    Args:
        forms: Of the program.
        replay: What was tuned.
        loader: Has the kernels' code.
        device: Where they run.
        strict: Refuse to run a form that nothing legal is tuned for.
    """

    def __init__(
        self, forms: Mapping[str, Form], replay: Replay, loader: CodeLoader, device: torch.device, *, strict: bool
    ) -> None:
        self._forms = forms
        self._replay = replay
        self._loader = loader
        self._device = device
        self._strict = strict
        self._lent = LentCounters()  # outlives the plans: graphs of others are replayed after a plan is dropped
        self._choices: dict[Site, Choice] = {}

    def form(self, fingerprint: str) -> Form:
        """Return a form of the program.

        Raises:
            ProgramError: There is none with this fingerprint.
        """
        form = self._forms.get(fingerprint)
        if form is None:
            raise ProgramError(f"the program applies form {fingerprint!r}, which it does not define")
        return form

    def choose(self, site: Site) -> Choice:
        """Return what runs at a site.

        Raises:
            NotTunedError: The dispatcher is strict and nothing legal is tuned.
            ProgramError: Nothing can run: the weights are packed for kernels that are not there.
        """
        known = self._choices.get(site)
        if known is None:
            known = self._choices[site] = self._choose(site)
        return known

    def forget(self) -> None:
        """Drop every prepared kernel that no plan holds."""
        self._choices.clear()

    def _choose(self, site: Site) -> Choice:
        symbolic = self.form(site.form)
        if len(site.dims) != len(symbolic.dims):
            raise ProgramError(f"form {site.form} has {len(symbolic.dims)} dims; it is applied with {len(site.dims)}")
        form = bind_form(symbolic, site.dims)
        entries = self._replay.forms.get(site.form, ())
        layouts = dict(site.layouts)
        legal = tuple(e for e in entries if len(e.dims) == len(site.dims) and fits(e.kernel, layouts))
        selection = select(legal, site.dims, slot_sizes(form), dict(site.addresses))
        nearest = nearest_entry(legal, site.dims)
        if selection.entry is not None:
            return Choice(self._prepare(selection.entry.kernel, form), selection, nearest)
        reasons = "; ".join(selection.reasons) or ("nothing is tuned for it" if not entries else "no kernel fits")
        what = f"{form_label(symbolic)} ({site.form}) at {site.dims}"
        if self._strict:
            raise NotTunedError(f"no tuned kernel for {what}: {reasons}")
        if any(layout != "transposed" for layout in layouts.values()):
            raise ProgramError(
                f"no kernel for {what} reads weights packed as {sorted(set(layouts.values()))}: {reasons}"
            )
        return Choice(self._prepare(body_kernel(form), form), selection, nearest)

    def _prepare(self, kernel: Kernel, form: Form) -> PreparedKernel:
        return prepare_kernel(kernel, form, self._loader, self._device, self._lent)


def nearest_entry(entries: Sequence[Entry], dims: tuple[int, ...]) -> Entry | None:
    """Return the entry that would run if every kernel were legal."""
    bare = tuple(Entry(e.dims, str(i), "", Kernel(()), 0, 0, 0, 0) for i, e in enumerate(entries))
    found = select(bare, dims, {}, {}).entry
    return None if found is None else entries[int(found.task)]

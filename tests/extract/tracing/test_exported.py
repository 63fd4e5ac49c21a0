from pathlib import Path

import msgspec
import pytest
import torch
from small_models import inputs, make_mixed
from torch.export import Dim

from tune_model.extract.checking.equivalence import check_equivalence
from tune_model.extract.request import ExportedSource, ModelInput, Phase, Request
from tune_model.extract.tracing.exported import SavedDtypeError, settle_exported, trace_exported
from tune_model.extract.tracing.front_end import SourceError, TraceError
from tune_model.extract.tracing.outputs import named_outputs


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "mixed.pt2"
    program = torch.export.export(make_mixed().eval(), (torch.ones(3, 8),), dynamic_shapes=({0: Dim.AUTO},))
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="module")
def static(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "static.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(8, 2), (torch.ones(3, 8),)), path)
    return path


def request(path: Path, *rows: int) -> Request:
    phase = Phase("forward", {"rows": rows})
    return Request(ExportedSource(str(path)), "float32", "forward", (phase,), inputs(x=("rows", 8)))


def test_a_saved_program_is_imported_with_its_names(dynamic):
    (trace,) = trace_exported(request(dynamic, 2, 5))
    assert [i.type.shape for i in trace.program.inputs] == [("rows", 8)]
    assert [o.name for o in trace.program.outputs] == ["first", "best", "at", "all"]
    assert "inner.weight" in {w.sources[0] for w in trace.program.weights}
    assert "tied.weight" not in {w.sources[0] for w in trace.program.weights}


def test_it_computes_what_it_did_before_it_was_saved(dynamic):
    comparisons = check_equivalence(request(dynamic, 2, 5), lambda trace: trace)
    assert len(comparisons) == 8


def test_fixed_sizes_need_no_inputs(static):
    (trace,) = trace_exported(Request(ExportedSource(str(static)), "float32", "forward", (Phase("forward", {}),)))
    assert trace.program.symbols == ()
    assert [(i.name, i.type.shape) for i in trace.program.inputs] == [("input", (3, 8))]


def test_a_fixed_size_serves_a_grid_of_that_one_value(static):
    (trace,) = trace_exported(request(static, 3))
    assert trace.program.inputs[0].type.shape == (3, 8)


def test_damaged_files_are_refused(tmp_path, dynamic, caplog):
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(dynamic.read_bytes()[:-2000])
    with pytest.raises(SourceError, match=r"damaged\.pt2 could not be read"):
        trace_exported(request(damaged, 2))
    with pytest.raises(SourceError, match="is not a file"):
        trace_exported(request(tmp_path / "missing.pt2", 2))
    assert not [
        record for record in caplog.records if record.name == "torch.export"
    ]  # a traceback, before our one line


@pytest.mark.parametrize(
    ("which", "change", "error", "says"),
    [
        ("dynamic", {"inputs": ()}, SourceError, "dynamic sizes in x; list all inputs"),
        ("dynamic", {"inputs": inputs(x=("rows", 8), y=(3,))}, SourceError, "takes 1 tensors"),
        ("dynamic", {"inputs": inputs(x=("rows", 8, 1))}, SourceError, "with 3 dims"),
        ("dynamic", {"inputs": (ModelInput("x", ("rows", 8), "int64"),)}, SourceError, "is int64"),
        ("dynamic", {"inputs": inputs(x=("rows", 9))}, TraceError, "'x', dim 1: 9"),
        (
            "two",
            {"inputs": inputs(number=("rows", 8), y=("rows",))},
            SourceError,
            "'number' is given where .* takes 'x'",
        ),
        ("dynamic", {"task": "causal-lm"}, TraceError, "transformers model"),
        ("static", {"phases": (Phase("forward", {"rows": (2, 3)}),)}, TraceError, "became the constant 3"),
        ("static", {"phases": (Phase("forward", {"rows": (2,)}),)}, TraceError, "2 became the constant 3"),
    ],
)
def test_requests_that_do_not_fit_are_refused(which, change, error, says, saved):
    path = saved[which]
    with pytest.raises(error, match=says):
        trace_exported(msgspec.structs.replace(request(path, 2), **change))


class Two(torch.nn.Module):
    """Two inputs of different dtypes, a third that is left out; tensors, nothing and a number come back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, number: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[object, ...]:
        y = torch.relu(self.layer(x)) + number[:, None]
        return y, None, {"sum": y.sum(-1), "mask": mask}, 3, y.shape[0]


def make_two() -> Two:
    torch.manual_seed(0)
    return Two()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[torch.dtype, Path]:
    folder = tmp_path_factory.mktemp("exported")
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        example = (torch.ones(3, 8, dtype=dtype), torch.ones(3, dtype=torch.int64))
        dynamic_shapes = ({0: Dim.AUTO}, {0: Dim.AUTO})
        program = torch.export.export(make_two().to(dtype).eval(), example, dynamic_shapes=dynamic_shapes)
        found[dtype] = folder / f"{dtype}.pt2"
        torch.export.save(program, found[dtype])
    return found


@pytest.fixture(scope="module")
def saved(dynamic, static, two) -> dict[str, Path]:
    return {"dynamic": dynamic, "static": static, "two": two[torch.float32]}


def undecided(path: Path, *names: str) -> Request:
    """Ask for a saved program without saying any dtype."""
    shapes = {"x": ("rows", 8), "number": ("rows",)}
    given = tuple(
        ModelInput(name, shapes.get(name, shape), "") for name, shape in zip(names, shapes.values(), strict=True)
    )
    return Request(ExportedSource(str(path)), "", "forward", (Phase("forward", {"rows": (2, 5)}),), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_saved_program_keeps_its_dtypes(two, dtype):
    """The configuration's default, bfloat16, was asked of every input, and a program in it was not compared."""
    name = str(dtype).removeprefix("torch.")
    for names in (("x", "number"), ("number", "x"), ("a", "b")):
        settled = settle_exported(undecided(two[dtype], *names))
        assert settled.dtype == name
        expected = {"x": name, "number": "int64", "a": name, "b": "int64"}
        assert [i.dtype for i in settled.inputs] == [expected[n] for n in names]
    assert check_equivalence(settled, lambda trace: trace)


def test_a_saved_program_is_given_no_other_dtype(two):
    request = msgspec.structs.replace(undecided(two[torch.float32], "x", "number"), dtype="bfloat16")
    with pytest.raises(SavedDtypeError, match=r"is bfloat16; expected float32, which .* was saved in and keeps"):
        settle_exported(request)


def test_what_is_no_tensor_among_the_outputs_is_left_out_as_of_a_module(two):
    """A saved program that returned None was refused."""
    (trace,) = trace_exported(settle_exported(undecided(two[torch.float32], "x", "number")))
    assert [o.name for o in trace.program.outputs] == list(named_outputs(make_two()(torch.ones(2, 8), torch.ones(2))))
    assert [o.name for o in trace.program.outputs] == ["output_0", "output_2_sum"]


def test_a_program_without_tensors_to_return_is_refused(tmp_path):
    class Nothing(torch.nn.Module):
        def forward(self, _: torch.Tensor) -> None:
            return None

    torch.export.save(torch.export.export(Nothing(), (torch.ones(3, 8),)), tmp_path / "nothing.pt2")
    with pytest.raises(TraceError, match="returns no tensors"):
        trace_exported(Request(ExportedSource(str(tmp_path / "nothing.pt2")), "", "forward", (Phase("forward", {}),)))

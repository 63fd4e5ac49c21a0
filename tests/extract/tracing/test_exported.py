from pathlib import Path

import msgspec
import pytest
import torch
from small_models import inputs, make_mixed
from torch.export import Dim

from tune_model.extract.checking.equivalence import check_equivalence
from tune_model.extract.request import ExportedSource, ModelInput, Phase, Request
from tune_model.extract.tracing.exported import trace_exported
from tune_model.extract.tracing.front_end import SourceError, TraceError


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
        ("dynamic", {"task": "causal-lm"}, TraceError, "transformers model"),
        ("static", {"phases": (Phase("forward", {"rows": (2, 3)}),)}, TraceError, "became the constant 3"),
        ("static", {"phases": (Phase("forward", {"rows": (2,)}),)}, TraceError, "2 became the constant 3"),
    ],
)
def test_requests_that_do_not_fit_are_refused(which, change, error, says, dynamic, static):
    path = {"dynamic": dynamic, "static": static}[which]
    with pytest.raises(error, match=says):
        trace_exported(msgspec.structs.replace(request(path, 2), **change))

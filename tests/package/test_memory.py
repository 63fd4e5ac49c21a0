"""The memory plan, worked out by hand for a small language model, and against what is allocated."""

import msgspec
import torch
from small_programs import (
    HEAD_DIM,
    KV_HEADS,
    MAX_LENGTH,
    VOCABULARY,
    WIDTH,
    empty_replay,
    language_model,
    language_weights,
    linear_relu,
    softmax_program,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tune_model.package.memory import activation_bytes, plan_memory
from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.kernel import Kernel, Workspace
from tune_model.runtime.program import fingerprint
from tune_model.runtime.replay import Entry, Replay
from tune_model.runtime.tuned import ModelParts, TunedModel

PROGRAMS = {phase: language_model(phase) for phase in ("prefill", "decode")}
GRIDS = {"prefill": {"batch": (1,), "sequence": (4, 8)}, "decode": {"batch": (1, 8), "context": (4, 16)}}


def test_a_language_model_by_hand():
    plan = plan_memory(PROGRAMS, empty_replay(), GRIDS, rows=8, weight_bytes=1000, graphs=True)
    assert (plan.weights, plan.rows, plan.slots) == (1000, 8, MAX_LENGTH)
    keys_and_values = 2 * 8 * KV_HEADS * MAX_LENGTH * HEAD_DIM * 4
    assert plan.cache == keys_and_values + 8 * (44 + 4 * (MAX_LENGTH + 1))
    assert plan.graphs == 4 * 2  # 1, 2, 4 and 8 rows, two contexts
    assert plan.graph_outputs == 2 * (1 + 2 + 4 + 8) * VOCABULARY * 4
    assert plan.workspace == max(
        activation_bytes(PROGRAMS["prefill"], {"batch": 1, "sequence": 8}),
        activation_bytes(PROGRAMS["decode"], {"batch": 8, "context": 4}),
    )
    assert plan.workspace > 8 * WIDTH * 4
    assert plan.total == plan.weights + plan.cache + plan.workspace + plan.graph_outputs


def test_the_cache_is_what_a_scheduler_allocates():
    parts = ModelParts(tuple(PROGRAMS.values()), {}, empty_replay(), {}, GRIDS)
    scheduler = TunedModel(parts, language_weights(), "cpu").scheduler(8)
    plan = plan_memory(PROGRAMS, empty_replay(), GRIDS, rows=8, weight_bytes=0, graphs=False)
    assert plan.cache == scheduler.state().cache_bytes
    assert (plan.graphs, plan.graph_outputs) == (0, 0)


def test_kernels_scratch_counts_where_it_is_used():
    program = softmax_program()
    key = fingerprint(linear_relu())
    workspaces = (Workspace("ws0", "float32", "4*a0.size0"), Workspace("ws1", "int32", 8))
    kernel = Kernel((), workspaces)
    replay = Replay({key: (Entry((6,), "t", "k", kernel, 1, 1, 1, 1), Entry((600,), "t", "k", kernel, 1, 1, 1, 1))})
    grid = {"forward": {"b": (2,), "s": (3,)}}
    bare = plan_memory({"forward": program}, empty_replay(), grid, rows=0, weight_bytes=0, graphs=True)
    plan = plan_memory({"forward": program}, replay, grid, rows=0, weight_bytes=0, graphs=True)
    assert plan.workspace - bare.workspace == 4 * 4 * 6 + 4 * 8
    assert (plan.cache, plan.graphs) == (0, 0)
    assert msgspec.to_builtins(plan)["rows"] == 0


class Alive(TorchDispatchMode):
    """Bytes of the memory that operators have made and that is still alive.

    Attributes:
        peak: The most there was after any operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self.made = {address: kept for address, kept in self.made.items() if not kept[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                storage = tensor.untyped_storage()
                self.made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return result


def test_activations_bound_what_is_alive_between_steps():
    """Every operator's results in a run: `t0` inside the form comes on top."""
    program = softmax_program()
    weights = {"w": torch.randn(6, 8), "bias": torch.randn(6)}
    run = Executor(program, weights, {"one": torch.ones(1)}, empty_replay(), {}, "cpu")
    x = torch.randn(16, 32, 8)
    run.run({"x": x})
    with Alive() as alive:
        run.run({"x": x})
    inside = 16 * 32 * 6 * 4
    assert alive.peak == activation_bytes(program, {"b": 16, "s": 32}) + inside

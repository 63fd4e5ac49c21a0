import torch
from form_builder import FormBuilder

from tune_model.runtime.program import Form, Ref
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.online import find_pairs, levels
from tune_model.tune.loops.rounding import elide_rounding


def nest_of(form: Form) -> LoopNest:
    nest = lower(form)
    assert isinstance(nest, LoopNest), nest
    return elide_rounding(nest)


def kinds(nest: LoopNest) -> list[tuple[str, bool]]:
    return [(pair.kind, pair.guarded) for pair in find_pairs(nest).values()]


def form_of(make) -> Form:
    b = FormBuilder("reduction")
    return b.form(make(b, b.input((4, 9), "bfloat16")))


def test_softmax_needs_one_pass_before_its_result():
    nest = nest_of(form_of(lambda b, x: b.call("softmax.int", x, -1)))
    assert kinds(nest) == [("exponentials", False)]
    assert (max(levels(nest, {})), max(levels(nest, find_pairs(nest)))) == (2, 1)


def test_logsumexp_guards_against_infinities():
    assert kinds(nest_of(form_of(lambda b, x: b.call("logsumexp.default", x, [-1])))) == [("exponentials", True)]


def test_layer_norm_and_variance():
    nest = nest_of(form_of(lambda b, x: b.call("layer_norm.default", x, [9])))
    assert kinds(nest) == [("squares", False)]
    assert max(levels(nest, find_pairs(nest))) == 1
    assert kinds(nest_of(form_of(lambda b, x: b.call("var.correction", x, [-1])))) == [("squares", False)]


def test_a_mean_that_is_rounded_first_is_another_center():
    """The model subtracts the mean in half precision on purpose: squares around that are not a variance's."""

    def make(b: FormBuilder, x: Ref) -> Ref:
        mean = b.call("_to_copy.default", b.call("mean.dim", x, [-1], True), dtype=torch.float16)
        gap = b.call("sub.Tensor", x, mean)
        return b.call("sum.dim_IntList", b.call("mul.Tensor", gap, gap), [-1])

    assert kinds(nest_of(form_of(make))) == []


def test_exponentials_above_something_else_are_no_pair():
    def make(b: FormBuilder, x: Ref) -> Ref:
        top = b.call("amax.default", b.call("abs.default", x), [-1], True)
        return b.call("sum.dim_IntList", b.call("exp.default", b.call("sub.Tensor", x, top)), [-1])

    assert kinds(nest_of(form_of(make))) == []

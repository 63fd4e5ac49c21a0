"""Greedy text of a traced Llama, token by token what transformers says: alone, ragged, joining, leaving, in parts."""

from typing import NamedTuple

import pytest
import torch
from small_models import LLAMA
from untuned import untuned

from tune_model.extract.plan import extract
from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.package.contents import build_replay
from tune_model.package.verification.original import build_original
from tune_model.runtime.generation.completion import Generation
from tune_model.runtime.generation.scheduler import Scheduler
from tune_model.runtime.tuned import ModelParts, TunedModel

NEW = 72
LENGTHS = (11, 3, 26, 1, 40)

REQUEST = Request(
    source=TransformersSource(config=LLAMA),
    dtype="float32",
    task="causal-lm",
    phases=(
        Phase("prefill", {"batch": (1,), "sequence": (8, 16)}),
        Phase("decode", {"batch": (1, 4), "context": (16, 64)}),
    ),
    max_length=120,
    max_batch=8,
)


class Case(NamedTuple):
    """The tuned model, the original, and prompts."""

    model: TunedModel
    original: torch.nn.Module
    prompts: list[list[int]]

    def said(self, prompt: list[int], count: int, answer: list[int]) -> bool:
        """Whether an answer is what the original says: in one pass over prompt and answer, its choice at each place."""
        with torch.no_grad():
            choices = self.original(torch.tensor([prompt + answer]), use_cache=False).logits[0].argmax(-1).tolist()
        return len(answer) == count and choices[len(prompt) - 1 : -1] == answer


@pytest.fixture(scope="module")
def case() -> Case:
    extraction = extract(REQUEST)
    original = build_original(REQUEST, None, torch.device("cpu"))
    grids = {phase.name: phase.grid for phase in REQUEST.phases}
    replay = build_replay(untuned(extraction.plan))
    parts = ModelParts(extraction.plan.programs, extraction.constants, replay, {}, grids)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in LENGTHS]
    return Case(TunedModel(parts, original, "cpu"), original, prompts)


def test_one_prompt(case: Case):
    (answer,) = case.model.complete(case.prompts[:1], NEW)
    assert case.said(case.prompts[0], NEW, answer)
    assert not case.said(case.prompts[0], NEW, [*answer[:-1], answer[-1] ^ 1])


def test_prompts_of_five_lengths(case: Case):
    answers = case.model.complete(case.prompts, NEW)
    assert all(case.said(p, NEW, a) for p, a in zip(case.prompts, answers, strict=True))


@pytest.mark.parametrize("rows", [2, 3])
def test_rows_join_and_leave_in_padded_parts(case: Case, rows: int):
    """Fewer rows than prompts, different lengths of answers, prompts in parts of 16, everything padded as on CUDA."""
    scheduler = Scheduler(case.model.language(), rows, exact=False)
    scheduler.prompt_tokens = 1
    counts = (72, 20, 64, 7, 70)
    asked = [scheduler.submit(p, Generation(n)) for p, n in zip(case.prompts, counts, strict=True)]
    while not scheduler.idle:
        scheduler.step()
    for prompt, count, completion in zip(case.prompts, counts, asked, strict=True):
        assert case.said(prompt, count, completion.tokens)
    misses = {row.program for row in case.model.coverage().rows() if row.outcome == "miss"}
    assert misses <= {"continuation"}  # its attention alone is not tuned

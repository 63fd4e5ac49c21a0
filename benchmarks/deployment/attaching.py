"""transformers' own `generate` before and after `attach`, and the tuned model's logits beside float32."""

from typing import Any, Final, NamedTuple

import msgspec
import torch
from bench.run import Bench, attempt
from torch import Tensor, nn

import tune_model
from deployment.artifacts import deploy, tuned_artifact
from deployment.decoding import device_of
from deployment.models import llama
from tune_model.package.read import open_artifact
from tune_model.package.verification.original import build_original
from tune_model.pipeline.bench.interleave import Contender, interleave
from tune_model.pipeline.bench.peers import release
from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.tuned import TunedModel

__all__ = ["run_attach", "run_logits"]

NEW: Final = 64
ANSWER: Final = 256
LENGTHS: Final = (96, 17, 256, 1, 180)


class _Row(NamedTuple):
    name: str


def run_attach(bench: Bench, *, small: bool) -> None:
    """Time greedy `generate` at batch 1, attached and on an equal model that nothing was attached to, interleaved."""
    if not bench.missing("attach", [_Row("generate b1")]):
        return
    path = tuned_artifact(bench, llama(small=small))
    device = device_of(bench)
    request = open_artifact(path).manifest.request
    model, untouched = (build_original(request, None, device) for _ in range(2))
    attached = tune_model.attach(model, path)
    new = 8 if small else NEW
    ids = torch.randint(3, 900, (1, 16 if small else 128), device=device)
    options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}

    def measure() -> dict[str, Any]:
        contenders = [
            Contender("attached", lambda: model.generate(ids, **options)),  # type: ignore[operator]
            Contender("eager", lambda: untouched.generate(ids, **options)),  # type: ignore[operator]
        ]
        ours, theirs = interleave(contenders, device, rounds=20, budget_s=60.0)
        if attached.unmatched():
            raise RuntimeError(f"calls ran the original: {attached.unmatched()}")
        return {
            "attached_token_ms": ours.wall_ms / new,
            "eager_token_ms": theirs.wall_ms / new,
            "speedup": theirs.ratio,
            "speedup_low": theirs.ratio_low,
            "speedup_high": theirs.ratio_high,
            "shared_bytes": attached.tuned.shared_memory().shared_bytes,
            "copied_bytes": attached.tuned.shared_memory().copied_bytes,
        }

    made = attempt(bench, "attach", "generate b1", measure)
    if made is not None:
        bench.tell(f"  attached {made['attached_token_ms']:.2f} ms a token, eager {made['eager_token_ms']:.2f} ms")
    attached.detach()
    release(device)


def run_logits(bench: Bench, *, small: bool) -> None:
    """Compare logits of 256 tokens of five ragged rows with float32: ours, and the original's in its own dtype."""
    if not bench.missing("logits", [_Row("5 rows")]):
        return
    path = tuned_artifact(bench, llama(small=small))
    device = device_of(bench)
    here = deploy(path, device)
    lengths = tuple(min(n, 20) for n in LENGTHS) if small else LENGTHS
    new = 12 if small else ANSWER

    def measure() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        vocabulary: int = here.original.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        prompts = [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]
        answers = here.tuned.complete(prompts, new)
        texts = [torch.cat([p, torch.tensor(a)]).to(device) for p, a in zip(prompts, answers, strict=True)]
        ours = _stepped(here.tuned, texts, lengths)
        theirs = [_forced(here.original, t, n) for t, n in zip(texts, lengths, strict=True)]
        request = open_artifact(path).manifest.request
        release(device)
        exact = build_original(msgspec.structs.replace(request, dtype="float32"), None, device)
        exact.load_state_dict({n: t.float() for n, t in here.original.state_dict().items()})
        truth = [_forced(exact, t, n) for t, n in zip(texts, lengths, strict=True)]
        errors = [[_error(a, b) for a, b in zip(made, truth, strict=True)] for made in (ours, theirs)]
        ratios = [a / b for a, b in zip(*errors, strict=True) if b > 0]
        return {
            "error_max": max(errors[0]),
            "eager_error_max": max(errors[1]),
            "error_ratio_max": max(ratios, default=1.0),
            "tokens": new * len(prompts),
        }

    made = attempt(bench, "logits", "5 rows", measure)
    if made is not None:
        bench.tell(f"  logits: {made['error_ratio_max']:.2f} times the original's error")


def _forced(model: nn.Module, text: Tensor, prompt: int) -> Tensor:
    """Return the original's logits at the places of an answer, (tokens, vocabulary)."""
    with torch.no_grad():
        logits: Tensor = model(text[None], use_cache=False).logits[0, prompt - 1 : -1]
    return logits.float().cpu()


def _stepped(tuned: TunedModel, texts: list[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    """Return the tuned model's logits at the same places: prompts one by one, then all rows step by step."""
    device, rows = tuned.device, len(texts)
    cache = KVCache(tuned.programs["decode"], rows, device)
    made: list[list[Tensor]] = []
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        inputs = {
            "input_ids": text[None, :length],
            "positions": torch.arange(length, device=device)[None],
            "logits_index": torch.full((1,), length - 1, device=device),
            **cache.slice(row, row + 1),
        }
        made.append([tuned.run("prefill", inputs)["logits"][0, -1].float().cpu()])
    new = min(t.shape[0] - n for t, n in zip(texts, lengths, strict=True))
    for step in range(new - 1):
        ids = torch.stack([t[n + step] for t, n in zip(texts, lengths, strict=True)])[:, None]
        positions = torch.tensor([[n + step] for n in lengths], device=device)
        logits = tuned.run("decode", {"input_ids": ids, "positions": positions, **cache.slice(0, rows)})["logits"]
        for row, line in zip(made, logits[:, -1].float().cpu(), strict=True):
            row.append(line)
    return [torch.stack(row) for row in made]


def _error(made: Tensor, truth: Tensor) -> float:
    return float((made.double() - truth.double()).norm() / truth.double().norm())

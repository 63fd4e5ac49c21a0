"""`docs/models.md`, made from the rows: the page says what the file says, and a test compares them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tune_model.pipeline.bench.result import BenchmarkResult

__all__ = ["page_of"]

Row = Mapping[str, Any]

_HEAD: Final = """# Models

Does it run on my model? What was tried: {models} architectures of transformers {transformers}, two layers each with
random weights in float32, on a CPU with torch {torch}. Each was planned, packaged, verified and loaded, and compared
with the original at sizes that nothing was traced at; language models also continued three prompts of different lengths
together, token by token beside transformers' own `generate`. Nothing was timed: a stand-in for the tuner chose packed
weights wherever they can be. {works} work and {refused} are refused with a reason{failed}. This page is made by
`benchmarks/models.py` from
[models.cpu.json](../benchmarks/results/models.cpu.json).

*in tasks* is the share of the arithmetic of matmuls and convolutions, attention apart, that the tuner races; what is
missing there, and whatever else *stays ATen*, runs as torch's operators (lookups and what makes small tensors are left
out).
*error* is the largest relative error of an output. Attention in *one step* is raced as such; *written out* means that
its products and its softmax are, one by one."""

_TAIL: Final = """## A model that is not here

Most other models of transformers run too. `tune-model plan CONFIG` says in seconds, without weights or a GPU, what
would be tuned and what would not, and compares a small copy with the original. What cannot be traced faithfully is
refused, with the line of the model's code or the feature that is in the way.

- A language model that is refused as `causal-lm` (a recurrent state, ALiBi, attention of its own) can still be traced
  as `task: forward` with its class in `architecture`: whole sequences at once, without a cache.
- A model that transformers does not have is a `source: torch`: a function that returns the module, and its inputs.
- A program that `torch.export` has saved (`.pt2`) needs no code of the model at all.

[configuration.md](configuration.md) has all three."""

_TITLES: Final = {
    "decoders": "Language models",
    "text": "Text encoders",
    "vision": "Images",
    "sound": "Sound",
    "translators": "One sequence to another",
}

_SMALL: Final = ("a lookup; moves few bytes", "makes a small tensor")


def page_of(result: BenchmarkResult) -> str:
    """Return the page's text."""
    failed = int(result.summary["failed"])
    head = _HEAD.format(
        models=len(result.rows),
        works=int(result.summary["works"]),
        refused=int(result.summary["refused_with_reason"]),
        failed=f", and {failed} fail" if failed else "",
        torch=result.versions["torch"].split("+")[0],
        transformers=result.versions["transformers"],
    )
    parts = [head]
    for shard, title in _TITLES.items():
        rows = [row for row in result.rows if row["shard"] == shard]
        works = [row for row in rows if row.get("status") == "works"]
        others = [row for row in rows if row.get("status") != "works"]
        if works:
            parts += [f"## {title}", _table(works, decoders=shard == "decoders")]
        if others:
            parts.append(_refusals(others))
    return "\n\n".join([*parts, _TAIL]) + "\n"


def _table(rows: Sequence[Row], *, decoders: bool) -> str:
    columns = ["architecture", "known as", "attention", "in tasks", "stays ATen", "error"]
    if decoders:
        columns[2] = "tokens"
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        third = "{} of {}".format(*row["tokens"]) if decoders else _attention(row)
        share = "" if row["covered"] is None else f"{100 * row['covered']:.0f} %"
        error = f"{row['error']:.0e}" if row["error"] else "0"
        lines.append([f"`{row['row']}`", row["known"], third, share, _left(row), error])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _attention(row: Row) -> str:
    if row["attention"]:
        return "one step"
    return "written out" if row["spelled_attention"] else "none"


def _left(row: Row) -> str:
    """Name the operators that stay, but for lookups and what makes small tensors."""
    names = [entry["op"].split(".")[1] for entry in row["aten"] if entry["reason"] not in _SMALL]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _refusals(rows: Sequence[Row]) -> str:
    lines = [["refused", "known as", "why"], ["---"] * 3]
    for row in rows:
        says = row.get("says") or f"fails: {row['failed']}"
        lines.append([f"`{row['row']}`", row.get("known", ""), says.replace("|", "\\|")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""`tune-model verify ARTIFACT`: is it whole, does it fit this machine, does it compute what the model computes."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import artifact_argument, verify_key_option, weights_option

if TYPE_CHECKING:
    from tune_model.package.signature import VerifyKey
    from tune_model.package.verification.check import Check

__all__ = ["command"]

EXIT_FAILED = 4

HELP = """Verify ARTIFACT on this machine.

Looks at its signature (with --verify-key), every file's hash, the machine against both fingerprints, the operators
against the runtime's list, every winner's kernel against a float64 reference, and the whole program against the
original model (greedy tokens for a causal LM in float32; errors relative to eager PyTorch otherwise). Runs the
artifact's machine code, as loading does.

\b
  tune-model verify llama-3-8b.tuned
  tune-model verify minilm.tuned --weights ./all-MiniLM-L6-v2

Exits 0 when every check passes and 4 when one fails.
"""


@click.command("verify", help=HELP)
@artifact_argument
@weights_option
@click.option("--device", default=None, help="Where to run; by default the kind it was tuned for.")
@verify_key_option
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def command(
    artifact_path: str, weights_path: str | None, device: str | None, verify_key: "VerifyKey | None", as_json: bool
) -> int:
    """Run the checks and print each as it is made."""
    import msgspec

    from tune_model.package.verify import verify
    from tune_model.pipeline.console import console
    from tune_model.pipeline.stored import stored_request
    from tune_model.pipeline.streams import prints_of_others

    out = console()

    def show(check: "Check") -> None:
        if not as_json:
            out.print(line(check), markup=False, soft_wrap=True)

    with prints_of_others() if as_json else nullcontext():
        report = verify(
            artifact_path,
            request=lambda artifact: stored_request(artifact, Path.cwd()),
            weights=None if weights_path is None else Path(weights_path),
            device=device,
            report=show,
            verify_key=verify_key,
        )
    counts = Counter(check.outcome for check in report.checks)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        verdict = "verified" if report.passed else f"{counts['failed']} failed"
        skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
        out.print(f"{artifact_path}: {verdict}, {len(report.checks)} checks{skipped}", markup=False, soft_wrap=True)
    return 0 if report.passed else EXIT_FAILED


def line(check: "Check") -> str:
    """Return a check as one line; what was expected is shown only where it was not met."""
    text = f"{check.outcome:8}{check.name}: {check.seen}"
    return text if check.outcome == "passed" else f"{text} (expected {check.expected})"

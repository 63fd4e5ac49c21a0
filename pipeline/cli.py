"""The `tune-model` command: finds the subcommand, and turns what goes wrong into one line and an exit code.

Exit codes: 0 ok; 2 usage, configuration or input, or no memory for it; 3 finished with failures or budget spent; 4
verification or coverage failed; 5 regression gate; 130 interrupted. An error carries its own code
(`TuneModelError.exit_code`).
"""

import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

import click

import tune_model
from tune_model.pipeline.commands import COMMANDS, DEFAULT
from tune_model.pipeline.config import shipped_configs
from tune_model.pipeline.streams import outlive_readers
from tune_model.runtime.errors import TuneModelError

__all__ = ["main"]

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "out of memory")
"""Of a `RuntimeError`: torch's allocator for the CPU and the CUDA driver have no type of their own for it."""

HELP = """Tune a whole model for one machine and write one deployment artifact.

\b
  tune-model quickstart.yaml              tune a shipped example on this machine
  tune-model my-model.yaml -o out.tuned   tune your own
  tune-model COMMAND --help               what a command does, its options and exit codes

A bare file name that is not in the current folder is looked up among the shipped examples. `tune-model CONFIG.yaml` is
short for `tune-model tune CONFIG.yaml`.
"""
EPILOG = """\b
Exit codes:
  0    ok
  2    wrong usage, configuration or input, or no memory for it
  3    finished with failures, or the budget was spent
  4    verification or coverage failed
  5    regression gate
  130  interrupted; run the same command again to go on
"""


class CommandGroup(click.Group):
    """Subcommands imported when used; a first argument that names none belongs to the default one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands in the order they are registered."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command's file."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"tune_model.pipeline.commands.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the registry, importing none of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or hand all arguments to the default one if the first looks like a configuration."""
        if args[0] not in COMMANDS and DEFAULT in COMMANDS and looks_like_config(args[0]):
            args = [DEFAULT, *args]
        return super().resolve_command(ctx, args)


def looks_like_config(argument: str) -> bool:
    """Tell a configuration from a mistyped command: it ends in .yaml or .yml, names a place, or is a shipped one."""
    if argument.endswith((".yaml", ".yml")) or os.sep in argument:
        return True
    return f"{argument}.yaml" in shipped_configs()


def print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """Print the version and leave."""
    if wanted and not ctx.resilient_parsing:
        click.echo(f"tune-model {tune_model.__version__}")
        ctx.exit()


@click.group(cls=CommandGroup, help=HELP, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, callback=print_version, expose_value=False, is_eager=True, help="Print the version."
)
@click.option("-v", "--verbose", count=True, help="Log to standard error what is being done (-vv: in detail).")
@click.option("--traceback", is_flag=True, expose_value=False, help="Show where an error was raised.")
def group(verbose: int) -> None:
    """Hold the options that go before the command's name; `run` acts on --traceback."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tune_model").setLevel(level)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its documented code.

    Args:
        arguments: What follows the program's name; the process's own arguments by default.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    outlive_readers()
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code; errors become one line on standard error."""
    try:
        refuse_empty(arguments)
        with _short_warnings():
            result: Any = group.main(arguments, prog_name="tune-model", standalone_mode=False, obj=tuple(arguments))
        if sys.stdout is not None:  # it is where it was closed
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        advice = f" (see {context.command_path} --help)" if context is not None else ""
        click.echo(f"error: {one_line(error.format_message())}{advice}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except (TuneModelError, OSError) as error:
        if "--traceback" in arguments:
            raise
        click.echo(f"error: {describe(error)}", err=True)
        return error.exit_code if isinstance(error, TuneModelError) else EXIT_USAGE
    except (MemoryError, RuntimeError) as error:
        what = exhausted(error)
        if what is None or "--traceback" in arguments:
            raise
        click.echo(f"error: {what}", err=True)
        return EXIT_USAGE


def exhausted(error: MemoryError | RuntimeError) -> str | None:
    """Say what there was too little of, and what to do; `None` for an error that is about something else."""
    if isinstance(error, RecursionError):
        return "something is nested too deeply, an input file or the model; --traceback tells where"
    text = one_line(str(error))
    torch: Any = sys.modules.get("torch")  # without it nothing of its kind was raised
    of_torch = torch is not None and isinstance(error, torch.OutOfMemoryError)
    if not (isinstance(error, MemoryError) or of_torch or any(sign in text for sign in _NO_MEMORY)):
        return None
    advice = "free some, take a device with more, or a smaller model, grid or batch"
    return f"out of memory: {advice}" + (f" ({text.split('. ')[0]})" if text else "")


def refuse_empty(arguments: list[str]) -> None:
    """Refuse empty arguments: no command has a use for one, and `-o "$UNSET"` must not mean the default.

    Raises:
        click.UsageError: There is one.
    """
    for index, argument in enumerate(arguments):
        if not argument or re.fullmatch(r"--[a-z-]+=", argument):
            before = f" after {arguments[index - 1]}" if index and not argument else ""
            raise click.UsageError(f"argument {argument!r}{before} is empty; expected a value (is a variable unset?)")


def describe(error: TuneModelError | OSError) -> str:
    """Say an error in one line. What the system refused (disk full, a file where a folder is needed) names its path."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror or type(error).__name__}"
    return one_line(str(error))


def one_line(text: str) -> str:
    """Put a message into one line."""
    return " ".join(text.split("\n"))


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Say this project's own warnings in one line, without the place in the source that raised them."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if category.__module__.startswith("tune_model."):
                click.echo(f"warning: {one_line(str(message))}", err=True)
            else:
                shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield

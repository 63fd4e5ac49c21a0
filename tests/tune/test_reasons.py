"""Every reason and status that the code gives is on its list, which the documentation is compared with."""

import ast
from pathlib import Path

from sources import room_modules

from tune_model.tune.candidate import REASONS, TRANSIENT_REASONS
from tune_model.tune.choice import STATUSES

NEVER_RECORDED = {"abandoned"}
"""The run had to end, which says nothing about the candidate."""


def texts_in(node: ast.AST) -> set[str]:
    """The texts that an expression may be, as far as they are written out."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=body, orelse=orelse):
            return texts_in(body) | texts_in(orelse)
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return {text.partition(":")[0]}
    return set()


def reasons_given() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path, tree in room_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Rejected":
                first = node.args[0] if node.args else next(k.value for k in node.keywords if k.arg == "reason")
                found |= dict.fromkeys(texts_in(first), path)
    return found


def test_every_reason_that_is_given_is_on_the_list():
    given = reasons_given()
    assert {reason: path for reason, path in given.items() if reason not in REASONS | NEVER_RECORDED} == {}
    assert len(given) > 10


def test_every_reason_on_the_list_is_given():
    sources = "".join(ast.unparse(tree) for path, tree in room_modules("tune") if path.name != "candidate.py")
    assert [reason for reason in REASONS if repr(reason) not in sources] == []
    assert TRANSIENT_REASONS < REASONS


def test_every_status_is_on_the_list_and_the_other_way_round():
    returned: set[str] = set()
    for path, tree in room_modules("tune"):
        if path == Path("tune/assembly.py"):
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and node.name in {"_status", "status_of"}:
                    values = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
                    returned |= {text for value in values if value is not None for text in texts_in(value)}
    assert returned == STATUSES

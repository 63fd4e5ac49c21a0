import re

from sources import ROOT, tracked_files

# Written in pieces so that this file does not match itself.
FORBIDDEN = {
    "a folder of one machine": re.compile(r"(?<![\w.~-])/(ho" + "me|ro" + "ot|wo" + "rk)/"),
    "a package registry's host": re.compile(r"py" + r"pi\.org|python" + r"hosted|download\.py" + "torch"),
    "an index option": re.compile("--(extra-)?index" + "-url|--find" + "-links"),
    "a private address": re.compile(r"https?://(10|172\.(1[6-9]|2\d|3[01])|192\.168)\."),
}
BINARY = {".safetensors", ".tuned", ".cubin", ".so", ".gz", ".png", ".zip", ".pt2", ".onnx"}


def test_no_tracked_file_names_a_machine_or_a_registry():
    found = []
    for path in tracked_files():
        if path.suffix in BINARY:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {what}" for what, rule in FORBIDDEN.items() if rule.search(line)
            ]
    assert found == []

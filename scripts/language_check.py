"""Check how docstrings and comments are worded: `python scripts/language_check.py [PATH …]`.

A docstring begins with a verb or names the thing, a `#:` comment has a subject, and some words have a plainer
replacement. CONTRIBUTING.md says why.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("training_harness", "collector", "app", "tidegauge", "benchmarks", "scripts", "tests")
#: First words that leave a docstring or a `#:` comment without a subject.
CLAUSE_WORDS = (
    "And",
    "As",
    "Because",
    "But",
    "How",
    "If",
    "Nor",
    "Of",
    "Or",
    "Since",
    "So",
    "Than",
    "That",
    "Until",
)
CLAUSE_WORDS += ("Until", "What", "When", "Where", "Whether", "Which", "While", "Who", "Whose", "Why")
#: Words in docstrings and comments -> what to write instead.
PLAINER = {
    "anew": "again",
    "beside": "next to, or besides",
    "nobody": "no process, or no one",
    "so many": "the number",
    "told": "reported, recorded or shown",
    "whoever": "the process that",
    "whom": "that",
}
_PLAINER = re.compile(rf"\b({'|'.join(PLAINER)})\b", re.IGNORECASE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main(paths: list[str]) -> int:
    """Print every complaint; return the exit status."""
    files = [
        file
        for path in paths or PACKAGES
        for file in ([Path(path)] if path.endswith(".py") else Path(path).rglob("*.py"))
        if not any(part.startswith(".") for part in file.parts)  # environments of other tools
    ]
    complaints = [complaint for file in sorted(files) for complaint in check(file)]
    print("\n".join(complaints) or "All wording checks passed!")
    return 1 if complaints else 0


def check(file: Path) -> Iterator[str]:
    """Yield `file:line: complaint`."""
    for line, text, needs_subject in passages(file):
        words = text.split()
        if needs_subject and words and words[0].strip(",.:") in CLAUSE_WORDS:
            yield f"{file}:{line}: begins with {words[0]!r}: begin with a verb, or with the thing itself"
        for word in _PLAINER.findall(text):
            yield f"{file}:{line}: {word!r}: write {PLAINER[word.lower()]}"


def passages(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, whether its beginning counts) of every docstring and comment."""
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text, True
    after_comment = 0
    with file.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type == tokenize.COMMENT:
                text, line = token.string, token.start[0]
                goes_on = line == after_comment + 1
                after_comment = line if token.line.lstrip().startswith("#") else 0
                yield line, text.lstrip("#: "), text.startswith("#:") and not goes_on


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

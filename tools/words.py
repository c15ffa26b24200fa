"""Fails if code, comments, docstrings or pages use a private word or phrase.

`make lint` runs it. docs/glossary.md has the words to use instead.

    python tools/words.py [PATH ...]    # without a path: every tracked file
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cuh", ".cu", ".cpp", ".py", ".md"}

# A word in any of its forms, as a word or as a part of an identifier -> what to write instead.
BANNED = {
    "piece|pieces": "chunk (16 bytes), term (of bf16x3), tile, slice",
    "stretch|stretches": "range, slice, swizzle row",
    "turned": "swapped, swap_ab, rotated",
    "joined": "reduced across the cluster, concatenated",
    "deal|deals|dealt": "schedule, assign",
    "told": "reported, encoded, passed",
    "walk|walks|walked": "schedule, iterate, loop",
    "room|rooms": "op, folder, buffer, space",
    "nobody|somebody|anybody": "no thread, no caller, a caller",
    "nowhere": "null",
    "copy engine": "TMA",
    "of whose": "whose",
    "that of those": "name the noun",
}
# Words that are right at times: how often csrc may use them. The limits may only fall.
LIMITED = {"turn|turns": 25, "line|lines": 20, "take|takes|taken": 40}
# Openers that make a comment or docstring depend on the text before it.
OPENERS = re.compile(r"(Of|The same|That|Those|It)\b(?! (is|are) not enough)")
# Phrases of Python comments and docstrings that hide the noun -> what to write instead.
PHRASES = {
    "None where": "None if",
    "where (there|none)": "if ..., with the subject",
    "of (which|whose|what)": "a sentence of its own",
    "what (is|are|was|were|else)|What": "the noun: the result, the arguments, the reason",
}

PART = r"(?<![a-z])(?:{0})(?![a-z])"  # a word in snake_case or prose
CAMEL = r"(?<=[a-z0-9])(?:{0})(?=[A-Z0-9_]|\b)|\bk(?:{0})(?=[A-Z0-9_]|\b)"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CALLS = re.compile(r"\b(ast|os|tree|self)\.walk\(|cache lines?\b|command lines?\b")


def forms(words: str) -> re.Pattern[str]:
    """The pattern of the words in prose, snake_case and CamelCase."""
    upper = "|".join(word.capitalize() for word in words.split("|"))
    return re.compile(
        "|".join((PART.format(words), PART.format(upper), CAMEL.format(upper))),
    )


BANNED_FORMS = [(forms(words), instead) for words, instead in BANNED.items()]
LIMITED_FORMS = {words: forms(words) for words in LIMITED}


def comments(path: Path, lines: list[str]) -> list[tuple[int, str]]:
    """The text of each comment block and docstring, with the number of its first line."""
    mark = "#" if path.suffix == ".py" else "//"
    if path.suffix == ".md":
        return []
    found, before = [], False
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        is_comment = stripped.startswith(mark) and not stripped.startswith("#!")
        text = stripped.lstrip(mark).strip()
        if is_comment and before:
            found[-1] = (found[-1][0], f"{found[-1][1]} {text}")
        elif is_comment:
            found.append((number, text))
        elif f"  {mark} " in line:
            found.append((number, line.rsplit(f"  {mark} ", 1)[1].strip()))
        before = is_comment
    if path.suffix == ".py":
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                found.append((node.body[0].lineno, " ".join(text.split())))
    return found


def findings(path: Path) -> list[str]:
    """One line for each hit in a file."""
    lines = path.read_text().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        kept = CALLS.sub("", line)
        for pattern, instead in BANNED_FORMS:
            for hit in pattern.finditer(kept):
                found.append(f"{path}:{number}: '{hit[0]}': {instead}")
    for number, text in comments(path, lines):
        if OPENERS.match(text):
            found.append(f"{path}:{number}: a comment begins with '{OPENERS.match(text)[0]}'")
        for pattern, instead in PHRASES.items() if path.suffix == ".py" else ():
            for hit in re.finditer(rf"\b(?:{pattern})\b", text):
                found.append(f"{path}:{number}: '{hit[0]}': {instead}")
    return found


def tracked() -> list[Path]:
    """The files of the repository that are read, without results and this list."""
    out = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in out.stdout.splitlines()]
    return [p for p in paths if p.suffix in SUFFIXES and is_read(p)]


def is_read(path: Path) -> bool:
    relative = path.resolve().relative_to(ROOT)
    return path.exists() and "results" not in relative.parts and path.name != "words.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path)
    given = parser.parse_args().paths
    paths = tracked()
    if given:
        wanted = [path.resolve() for path in given]
        paths = [p for p in paths if any(w == p or w in p.parents for w in wanted)]
    found = [line for path in paths for line in findings(path)]
    counts: Counter[str] = Counter()
    for path in paths:
        if "csrc" in path.parts:
            text = CALLS.sub("", path.read_text())
            for words, pattern in LIMITED_FORMS.items():
                counts[words] += len(pattern.findall(text))
    for words, limit in LIMITED.items():
        if counts[words] > limit:
            found.append(f"csrc: '{words}' is used {counts[words]} times; at most {limit}")
    print("\n".join(found[:400]) or "words: clean")
    if len(found) > 400:
        print(f"and {len(found) - 400} more")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

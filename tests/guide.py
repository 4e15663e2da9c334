"""README.md taken apart: sections, fenced blocks, code spans, and the commands in both."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
MARKER = re.compile(r"<!-- not run: (?P<why>[^;]+?)(?:; stand-ins: (?P<tests>[^;]+?))? -->")
OPERATORS = ("&&", "||", ";", "|")


@dataclass(frozen=True)
class Block:
    """A fenced block of the page.

    Attributes:
        language: The fence's info string; empty for none.
        code: What stands inside.
        section: The nearest heading above.
        not_run: Why nothing runs it, out of the comment directly before; None without one.
        stand_ins: Test files that try it with stand-ins, out of the same comment.
        around: The paragraphs beside it, as a reader sees them.
    """

    language: str
    code: str
    section: str
    not_run: str | None
    stand_ins: tuple[str, ...]
    around: str

    @property
    def first(self) -> str:
        """Its first line, without the comment at its end: what tables of tests know it by."""
        return self.code.split("\n")[0].split("  #")[0].strip()


def sections(text: str) -> dict[str, str]:
    """Each heading's own text, down to the next heading of any level."""
    found, title, fenced = {"": ""}, "", False
    for line in text.splitlines(keepends=True):
        if line.startswith("```"):
            fenced = not fenced
        if not fenced and (heading := re.match(r"#+ (.+)\n", line)):
            title = heading[1]
            assert title not in found, f"two headings are called {title!r}"
            found[title] = ""
        else:
            found[title] += line
    return found


def blocks(text: str) -> list[Block]:
    """Every fenced block, in the page's order."""
    return [block for title, part in sections(text).items() for block in _blocks(part, title)]


def _blocks(text: str, section: str) -> Iterator[Block]:
    for fence in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.M):
        before, after = text[: fence.start()].rstrip(), text[fence.end() :].lstrip("\n")
        marker = MARKER.fullmatch(before.split("\n")[-1])
        seen = before.removesuffix(marker[0]).rstrip() if marker else before
        beside = [seen.split("\n\n")[-1], after.split("\n\n")[0]]
        around = " ".join(" ".join(beside).split())
        yield Block(
            fence[1],
            fence[2],
            section,
            marker["why"] if marker else None,
            tuple((marker["tests"] or "").split()) if marker else (),
            around,
        )


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*\n(?:.*\n)*?```$", "", text, flags=re.M)


def spans(text: str) -> list[str]:
    """The code spans of the prose, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def commands(code: str) -> list[list[str]]:
    """The commands of shell code, each as its words; comments are left out."""
    found: list[list[str]] = []
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = list(lexer)
        while words:
            command = list(takewhile(lambda word: word not in OPERATORS, words))
            words = words[len(command) + 1 :]
            found += [command] if command else []
    return found


def all_commands(text: str) -> list[list[str]]:
    """The commands of every shell block and of every code span that begins like one."""
    found = [command for block in blocks(text) if block.language == "bash"
             for command in commands(block.code)]  # fmt: skip
    for span in spans(text):
        if re.match(
            r"(--|bash |python |pytest |uv |hf |vllm |scripts/|runbook/|[\w./]*bin/)", span
        ):
            found += commands(span)
    return found


def braces(path: str) -> list[str]:
    """`run{1,2}.yaml` -> both names."""
    if not (group := re.search(r"\{([^{}]*)\}", path)):
        return [path]
    return [
        name
        for part in group[1].split(",")
        for name in braces(path[: group.start()] + part + path[group.end() :])
    ]

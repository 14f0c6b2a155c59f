"""Families of small jobs. Each draws its names from the pool and answers with one part of a task.

A part has two checks: one that the right command turns true, and one that it must keep or also reach, so that the wrong
commands (which imperfect demonstrations use) pass one of two, and a dense reward has something to tell apart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_t1.environment.generate import checks as check
from megatron_t1.environment.generate.git_repository import empty_repository
from megatron_t1.environment.generate.pools import Pool


@dataclass(frozen=True)
class Part:
    """One sub-job: wordings of the instruction, the reference command, plausible wrong ones, two checks."""

    instructions: tuple[str, ...]
    command: str
    wrong: tuple[str, ...]
    checks: tuple[check.Check, check.Check]


@dataclass
class Draw:
    """The names and initial files of one task: no two parts share a file, so that parts don't disturb each other."""

    random: random.Random
    pool: Pool
    files: dict[str, str | bytes] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    def file(self, content: str | None = None, extensions: tuple[str, ...] = ("txt", "txt", "md")) -> str:
        """A new file name; with content the file is there from the start."""
        while True:
            name = f"{self.random.choice(self.pool.stems)}.{self.random.choice(extensions)}"
            if name not in self._used:
                break
        self._used.add(name)
        if content is not None:
            self.files[name] = content
        return name

    def unused(self, names: tuple[str, ...]) -> str:
        name = self.random.choice([name for name in names if name not in self._used])
        self._used.add(name)
        return name

    def directory(self) -> str:
        return self.unused(self.pool.directories)

    def words(self, count: int) -> list[str]:
        return self.random.sample(self.pool.words, count)

    def word(self) -> str:
        return self.random.choice(self.pool.words)


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def create(draw: Draw) -> Part:
    file, word = draw.file(), draw.word()
    return Part(
        (f"create {file} containing {word}", f"write {word} into a new file {file}"),
        f"echo {word} > {file}",
        (f"touch {file}", f"echo {word}"),
        (check.is_file(file), check.contains(file, f"{word}\n")),
    )


def append(draw: Draw) -> Part:
    first, second, new = draw.words(3)
    file = draw.file(_text([first, second]))
    return Part(
        (f"append {new} to {file}", f"add a line {new} at the end of {file}"),
        f"echo {new} >> {file}",
        (f"echo {new} > {file}",),
        (check.last_line(file, new), check.has_line(file, first)),
    )


def rename(draw: Draw) -> Part:
    word = draw.word()
    old, new = draw.file(f"{word}\n"), draw.file()
    return Part(
        (f"rename {old} to {new}",),
        f"mv {old} {new}",
        (f"cp {old} {new}",),
        (check.is_gone(old), check.contains(new, f"{word}\n")),
    )


def copy(draw: Draw) -> Part:
    text = f"{draw.word()}\n"
    old, new = draw.file(text), draw.file()
    return Part(
        (f"copy {old} to {new}", f"make a copy of {old} named {new}"),
        f"cp {old} {new}",
        (f"mv {old} {new}",),
        (check.contains(old, text), check.contains(new, text)),
    )


def delete_extension(draw: Draw) -> Part:
    extension = draw.unused(("log", "tmp", "bak"))
    for _ in range(2):
        draw.file(f"{draw.word()}\n", (extension,))
    kept = draw.file(f"{draw.word()}\n", ("dat",))
    return Part(
        (f"delete all {extension} files", f"remove every file ending in .{extension}"),
        f"rm *.{extension}",
        ("rm *", f"rm {extension}"),
        (check.none_with_extension(extension), check.is_file(kept)),
    )


def count_lines(draw: Draw) -> Part:
    number = draw.random.randint(2, 9)
    source, target = draw.file(_text(draw.words(number))), draw.file()
    return Part(
        (f"count the lines of {source} into {target}", f"save the number of lines of {source} in {target}"),
        f"wc -l < {source} > {target}",
        (f"wc -l {source} > {target}", f"wc -l {source}"),
        (check.is_file(target), check.contains_number(target, number)),
    )


def sort_lines(draw: Draw) -> Part:
    words = draw.words(4)
    if words == sorted(words):
        words.reverse()
    source, target = draw.file(_text(words)), draw.file()
    return Part(
        (f"sort {source} into {target}", f"save the sorted lines of {source} in {target}"),
        f"sort {source} > {target}",
        (f"sort {source}", f"cp {source} {target}"),
        (check.is_file(target), check.contains(target, _text(sorted(words)))),
    )


def csv_column(draw: Draw) -> Part:
    column, rows = draw.random.randint(1, 3), [draw.words(3) for _ in range(3)]
    source, target = draw.file(_text([",".join(row) for row in rows]), ("csv",)), draw.file()
    return Part(
        (f"extract field {column} of {source} into {target}", f"save column {column} of {source} in {target}"),
        f"cut -d , -f {column} {source} > {target}",
        (f"cut -f {column} {source} > {target}", f"cut -d , -f {column} {source}"),
        (check.is_file(target), check.contains(target, _text([row[column - 1] for row in rows]))),
    )


def chmod(draw: Draw) -> Part:
    text, mode = f"{draw.word()}\n", draw.random.choice(("600", "700", "640", "755", "400"))
    file = draw.file(text)
    return Part(
        (f"set the mode of {file} to {mode}", f"change permissions of {file} to {mode}"),
        f"chmod {mode} {file}",
        (f"chmod 666 {file}",),
        (check.has_mode(file, int(mode, 8)), check.contains(file, text)),
    )


def make_tree(draw: Draw) -> Part:
    outer, inner = draw.directory(), draw.directory()
    return Part(
        (f"make the directory tree {outer}/{inner}", f"create directory {inner} inside new directory {outer}"),
        f"mkdir -p {outer}/{inner}",
        (f"mkdir {outer}/{inner}", f"mkdir {outer}"),
        (check.is_directory(outer), check.is_directory(f"{outer}/{inner}")),
    )


def set_value(draw: Draw) -> Part:
    key, other = draw.random.sample(draw.pool.keys, 2)
    old, kept, new = draw.words(3)
    before, after = [f"{key}={old}", f"{other}={kept}"], [f"{key}={new}", f"{other}={kept}"]
    if draw.random.random() < 0.5:
        before.reverse(), after.reverse()
    file = draw.file(_text(before), ("cfg",))
    return Part(
        (f"set {key} to {new} in {file}", f"change the value of {key} to {new} in {file}"),
        f"sed -i s/{key}=.*/{key}={new}/ {file}",
        (f"echo {key}={new} >> {file}", f"echo {key}={new} > {file}"),
        (check.has_line(file, f"{key}={new}"), check.contains(file, _text(after))),
    )


def move_into(draw: Draw) -> Part:
    file, directory = draw.file(f"{draw.word()}\n"), draw.directory()
    draw.directories.append(directory)
    return Part(
        (f"move {file} into directory {directory}",),
        f"mv {file} {directory}",
        (f"cp {file} {directory}",),
        (check.is_gone(file), check.is_file(f"{directory}/{file}")),
    )


def head_lines(draw: Draw) -> Part:
    number, words = draw.random.randint(1, 4), draw.words(6)
    source, target = draw.file(_text(words)), draw.file()
    return Part(
        (f"save the first {number} lines of {source} in {target}",),
        f"head -n {number} {source} > {target}",
        (f"head {source} > {target}", f"head -n {number} {source}"),
        (check.is_file(target), check.contains(target, _text(words[:number]))),
    )


def grep_word(draw: Draw) -> Part:
    words = draw.words(5)
    word, more = draw.random.choice(words), draw.random.randint(1, 3)
    lines = [f"{item} {index}" for index, item in enumerate(words)] + [f"{word} {7 + index}" for index in range(more)]
    source, target = draw.file(_text(lines)), draw.file()
    found = [line for line in lines if line.split()[0] == word]
    return Part(
        (
            f"save the lines of {source} with {word} in {target}",
            f"find {word} in {source} and store the matches in {target}",
        ),
        f"grep {word} {source} > {target}",
        (f"grep {word} {source}", f"cp {source} {target}"),
        (check.is_file(target), check.contains(target, _text(found))),
    )


def json_value(draw: Draw) -> Part:
    key, other = draw.random.sample(draw.pool.keys, 2)
    old, kept, new = draw.words(3)
    file = draw.file(json.dumps({key: old, other: kept}, indent=1) + "\n", ("json",))
    return Part(
        (f"in the json file {file} change {old} to {new}", f"replace the json value {old} by {new} in {file}"),
        f"sed -i s/{old}/{new}/ {file}",
        (f"sed s/{old}/{new}/ {file}", f"echo {new} > {file}"),
        (check.json_value(file, key, new), check.json_value(file, other, kept)),
    )


def git_branch(draw: Draw) -> Part:
    draw.files.update(empty_repository())
    branch = draw.unused(draw.pool.words)
    return Part(
        (f"create a git branch {branch}", f"make a new git branch named {branch}"),
        f"git branch {branch}",
        (f"git checkout -q -b {branch}", f"git checkout -q {branch}"),
        (check.git_branch_exists(branch), check.git_on_main()),
    )


def git_commit(draw: Draw) -> Part:
    draw.files.update(empty_repository())
    file, message = draw.file(f"{draw.word()}\n"), draw.word()
    return Part(
        (f"commit {file} to git with message {message}", f"git commit {file} with the message {message}"),
        f"git add {file} && git commit -q -m {message}",
        (f"git add {file}", f"git commit -q -m {message} --allow-empty"),
        (check.git_tracks(file), check.git_last_message(message)),
    )


@dataclass(frozen=True)
class Family:
    """`noise`: share of wrong commands in demonstrations; what PPO can then improve."""

    make: Callable[[Draw], Part]
    noise: float


FAMILIES = {
    "create": Family(create, 0.2),
    "append": Family(append, 0.6),
    "rename": Family(rename, 0.6),
    "copy": Family(copy, 0.3),
    "delete_extension": Family(delete_extension, 0.5),
    "count_lines": Family(count_lines, 0.6),
    "sort_lines": Family(sort_lines, 0.3),
    "csv_column": Family(csv_column, 0.5),
    "chmod": Family(chmod, 0.3),
    "make_tree": Family(make_tree, 0.6),
    "set_value": Family(set_value, 0.6),
    "move_into": Family(move_into, 0.4),
    "head_lines": Family(head_lines, 0.5),
    "grep_word": Family(grep_word, 0.3),
    "json_value": Family(json_value, 0.5),
    "git_branch": Family(git_branch, 0.3),
    "git_commit": Family(git_commit, 0.4),
}

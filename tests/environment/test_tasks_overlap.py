"""Overlap of task sets against counts by hand and a slow reference."""

import json
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.cli import main
from megatron_t1.environment import overlap
from megatron_t1.environment.overlap import Document, document, load_documents, measure
from megatron_t1.environment.task import Step, Task, TaskContent

WORDS = [f"word{number}" for number in range(400)]


def doc(name, instruction="", files="", tests=""):
    words = {"instruction": instruction.split(), "files": files.split(), "tests": tests.split()}
    return Document(name, words, {})


def text(seed, count=60):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def test_disjoint_sets_have_an_overlap_of_zero():
    train = [doc(f"a{number}", text(number), text(number + 100)) for number in range(8)]
    benchmark = [doc(f"b{number}", text(number + 200), text(number + 300)) for number in range(8)]
    found = measure(train, benchmark)
    assert found.share == 0 and not found.duplicated
    assert [found.parts[part].shared for part in overlap.PARTS] == [0, 0, 0]
    assert found.parts["instruction"].ngrams == 8 * (60 - 8 + 1)


def test_a_copy_a_rewording_and_a_quotation_are_found():
    own, other = text(1), text(2)
    words = own.split()
    reworded = " ".join("renamed" if index % 9 == 4 else word for index, word in enumerate(words))
    quoting = " ".join([*other.split()[:40], *words[10:30]])
    train = [doc("copy", own), doc("reworded", reworded), doc("quoting", quoting), doc("else", text(3))]
    found = measure(train, [doc("held_out", own)])
    pairs = {pair.train: pair for pair in found.pairs}
    assert found.duplicated == ("held_out",) and found.share == 1.0
    assert list(pairs)[0] == "copy" and pairs["copy"].similarity["instruction"] == 1.0
    assert pairs["quoting"].containment["instruction"] == pytest.approx(13 / 53)  # 20 words: 13 of its 53 8-grams
    assert pairs["quoting"].near_duplicate is False
    assert pairs["reworded"].similarity["instruction"] > 0.4 and "else" not in pairs


def test_the_runner_of_all_tasks_is_scaffold_and_a_task_copied_often_is_not():
    runner = text(9, 40)
    benchmark = [doc(f"b{number}", text(number), tests=f"{runner} {text(number + 50)}") for number in range(12)]
    train = [doc(f"a{number}", text(number + 900), tests=f"{runner} {text(number + 700)}") for number in range(12)]
    found = measure(train, benchmark)
    assert found.parts["tests"].shared == 0 and 0.3 < found.parts["tests"].scaffold < 0.5
    copies = [doc(f"copy{number}", text(3)) for number in range(12)]
    assert measure(copies, benchmark).duplicated == ("b3",)


def test_equal_instructions_are_duplicates_even_where_all_words_are_scaffold():
    same = [doc(f"b{number}", "create the file and stop") for number in range(20)]
    found = measure([doc("a", "Create the file, and stop".lower().replace(",", ""))], same)
    assert len(found.duplicated) == 20


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abcd"), max_size=14), min_size=1, max_size=4),
    st.lists(st.lists(st.sampled_from("abcd"), max_size=14), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_counts_agree_with_a_slow_reference(train, benchmark, size):
    def grams(words):
        return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}

    found = measure(
        [doc(f"a{n}", " ".join(words)) for n, words in enumerate(train)],
        [doc(f"b{n}", " ".join(words)) for n, words in enumerate(benchmark)],
        ngram=size,
    )
    known = set().union(*map(grams, train))
    assert found.parts["instruction"].ngrams == sum(len(grams(words)) for words in benchmark)
    assert found.parts["instruction"].shared == sum(len(grams(words) & known) for words in benchmark)
    pairs = {(pair.train, pair.benchmark): pair.containment.get("instruction", 0.0) for pair in found.pairs}
    for a, own in enumerate(train):
        for b, other in enumerate(benchmark):
            expected = len(grams(own) & grams(other)) / len(grams(other)) if grams(other) else 0.0
            assert pairs.get((f"a{a}", f"b{b}"), 0.0) == pytest.approx(expected)


def test_a_document_has_all_parts_and_binary_files_count_by_digest():
    content = TaskContent(
        files={"a.py": (b"def Same(): pass\n", 0o644), "b.bin": (b"\0" * 100, 0o644), "empty": (b"", 0o644)},
        tests={"test.sh": (b"echo test\n" * 10, 0o755)},
    )
    found = document(Task("t", "Do THIS", content=content, steps=(Step("s", "and that", 1, 1),)))
    assert found.words == {
        "instruction": ["do", "this", "and", "that"],
        "files": ["def", "same", "pass"],
        "tests": ["echo", "test"] * 10,
    }
    assert sorted(found.digests.values()) == ["files/b.bin", "tests/test.sh"]  # a.py is too short to mean anything
    other = document(Task("u", "else", content=TaskContent(files={"c": (b"\0" * 100, 0o600)})))
    assert measure([found], [other]).same_files == (("t", "u", "files/c"),)


@pytest.mark.skipif(not os.environ.get("T1_HARBOR_TASKS"), reason="T1_HARBOR_TASKS names no directory of real tasks")
def test_real_tasks_overlap_with_themselves_alone(tmp_path, capsys):
    real = os.environ["T1_HARBOR_TASKS"]
    assert main(["tasks", "overlap", real, real, "--max", "0.5", "--out", str(tmp_path / "o.json")]) == 1
    found = json.loads((tmp_path / "o.json").read_text())
    assert len(found["near_duplicates"]) == 16 and "share 1.0000" in capsys.readouterr().out
    documents = load_documents(real)
    halves = measure(documents[:8], documents[8:])
    assert halves.share == 0 and halves.pairs[0].worst < 0.2

"""Quotes, escapes and variables in a Dockerfile, against what docker build makes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.environment.dockerfile_words import expanded, has_here_document, literal, split_words
from megatron_t1.environment.exec_limits import MAX_WORD_BYTES
from megatron_t1.environment.image import DEFAULT_PATH, RunCommand
from megatron_t1.errors import T1Error

SET = {"B": "1", "EMPTY": "", "LONG": "x" * MAX_WORD_BYTES}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("'$B'", "$B"),
        ("\\$B", "$B"),
        ('"\\$B \\n \\" $B"', '$B \\n " 1'),
        ("a'b'\"c\"\\ d", "abc d"),
        ('"it\'s $B"', "it's 1"),
        ("${B}x$Bx$B.x$", "1x1.x$"),
        ("${B:+y}${U:+y}${EMPTY:+y}${EMPTY+z}", "yz"),
        ("${U-d}${EMPTY-d}${EMPTY:-e}${B:-f}", "de1"),
        ("${U:-${EMPTY:-$B'}'}}", "1}"),
        ('${U:-"}"}', "}"),
        ("${B?no}$1$@", "1"),
        ("a\\", "a"),
    ],
)
def test_what_a_word_stands_for(text, result):
    assert expanded(text, SET.get) == result


@pytest.mark.parametrize(
    "text",
    [
        "'",
        '"',
        "${B",
        "${",
        "${}",
        "${B#x}",
        "${B%x}",
        "${B/a/b}",
        "${B:x}",
        "${B:}",
        "${U?no}",
        "${EMPTY:?no}",
        "$LONG$LONG",
        "${U:-" * 60 + "}" * 60,
    ],  # fmt: skip
)
def test_what_cannot_be_done_is_refused(text):
    with pytest.raises(ValueError):
        expanded(text, SET.get)


@given(st.text("ab $'\"\\{}:-+?B", max_size=30))
def test_any_text_is_a_word_or_refused(text):
    split_words(text)
    try:
        expanded(text, SET.get)
    except ValueError:
        pass


@given(st.text(st.characters(blacklist_characters="\r\n\0", blacklist_categories=("Cs",)), max_size=30))
def test_a_literal_stands_for_itself(text):
    assert expanded(literal(text), SET.get) == text
    assert len(split_words(f"A={literal(text)} B=2")) == 2


@pytest.mark.parametrize(
    ("line", "found"),
    [("cat > /x <<RUN", True), ("cat <<-'EOF' > /x", True), ("3<<E cat", True), ("cat <<< word", False),
     ("bash -c 'cat <<EOF'", False), ("echo $((1<<3))", False), ("a < b", False)],
)  # fmt: skip
def test_here_documents(line, found):
    assert has_here_document(line) is found


def test_a_here_document_is_not_read_as_instructions(image):
    with pytest.raises(T1Error, match="line 2: RUN: here-documents are not supported"):
        image("FROM a\nRUN cat > /x <<RUN\nRUN echo hi\nRUN\n")


def test_another_escape_character_is_refused(image):
    with pytest.raises(T1Error, match="line 1: another escape character"):
        image("# escape=`\nFROM a\nENV A=a` b\n")


def test_path_goes_on_from_the_base(image):
    found = image('FROM a\nENV PATH="/opt/venv/bin:$PATH"\nENV PATH=/x:${PATH}\nRUN a\n')
    assert found.env["PATH"] == f"/x:/opt/venv/bin:{DEFAULT_PATH}"


def test_a_line_sees_the_variables_from_before_it(image):
    found = image("FROM a\nENV A=old\nENV A=new B=$A\nENV G a  'b c' $B\nARG X=1 Y=$X\nRUN x\n")
    assert found.env == {"A": "new", "B": "old", "G": "a  b c old"}
    assert next(step for step in found.steps if isinstance(step, RunCommand)).env["Y"] == ""


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("ENV J", "'J' has no value"),
        ("ENV A=1 B", "'B' is not NAME=value"),
        ("ENV A='", "a quote is never closed"),
        ("ENV A=${B#x}", "not supported"),
        ("COPY --chmod=7777777777777 Dockerfile /x", "--chmod=7777777777777 is not an octal number"),
        ("COPY --chmod=-1 Dockerfile /x", "--chmod=-1 is not"),
        ("USER nobody:99999999999999999999", "at most 2147483647"),
        ("USER 2147483648", "at most 2147483647"),
        ('COPY ["Dockerfile", "/a\\u0000"]', "is not a JSON list of words"),
        (f"WORKDIR /{'a/' * 3000}", "longer than a path can be"),
        (f"RUN echo {'x' * MAX_WORD_BYTES}", "a program can be given"),
        (f"ENV A={'x' * MAX_WORD_BYTES}", "a program can be given"),
        (f"USER {'x ' * 9999}", "USER: 'x x"),
        ("ARG " + " ".join(f"A{number}=1" for number in range(1001)), "more than 1000 arguments"),
        ("ENV " + " ".join(f"A{number}=1" for number in range(1001)), "more than 1000 variables"),
    ],
)
def test_lines_that_no_docker_follows(image, line, problem):
    with pytest.raises(T1Error, match="line 2: ") as caught:
        image(f"FROM a\n{line}\n")
    assert problem in caught.value.problem and len(caught.value.problem) < 400


def test_variables_that_double_end_at_a_limit(image):
    with pytest.raises(T1Error, match="line 15: ENV: '\\$A\\$A'... is longer than"):
        image("FROM a\nENV A=" + "a" * 20 + "\n" + "ENV A=$A$A\n" * 40)
    with pytest.raises(T1Error, match="arguments and variables come to"):
        image("FROM a\nENV V=" + "x" * 1200 + "\n" + "\n".join(f"ENV V{number}=$V" for number in range(990)))

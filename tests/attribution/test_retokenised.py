"""Streams that are rendered and encoded again, against the ids they came from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_t1.attribution.findings import Scored, worst_tokens
from megatron_t1.attribution.job import Job
from megatron_t1.attribution.retokenised import Retokenised, retokenise
from megatron_t1.attribution.settings import BASELINE, Alternative, Kept, Setting
from megatron_t1.rollout.formats import load_format
from megatron_t1.trajectory.record import Origin
from tests.rollout.conftest import tiny_model  # noqa: F401
from tests.training.synthetic import episode


@pytest.fixture(scope="module")
def chat(tiny_model):  # noqa: F811
    return load_format("chatml_bash", tiny_model)


def said(chat, command: np.ndarray):
    """A prompt, one sampled call, and what follows it."""
    pieces = [
        (chat.open("create the file alpha.txt"), Origin.PROMPT),
        (np.concatenate([chat.command("")[:1], command, chat.command("")[-2:]]), Origin.SAMPLED),
        *((span.ids, span.origin) for span in chat.reply("ok", chat.command("x"))),
    ]
    ids = np.concatenate([ids for ids, _ in pieces]).astype(np.int32)
    origin = np.concatenate([np.full(len(ids), kind, np.uint8) for ids, kind in pieces])
    base = episode("a-0")
    logprobs = np.where(origin == Origin.SAMPLED, -1.0, np.nan).astype(np.float32)
    header = replace(base.header, policy_versions=(0,))
    rows = np.zeros(len(ids), bool)
    return replace(
        base, header=header, ids=ids, origin=origin, turn=np.zeros(len(ids), np.uint16), logprobs=logprobs, routes=None,
        routed=rows,
    )  # fmt: skip


def test_what_the_tokenizer_would_write_itself_comes_out_as_it_was(chat):
    assert retokenise(said(chat, chat.tokenizer.encode("cat notes.md")), chat) is None


def test_another_spelling_is_mapped_token_by_token(chat):
    """The sampler wrote `alpha` letter by letter: the text is the same, the ids aren't."""
    letters = np.concatenate([chat.tokenizer.encode(letter) for letter in "alpha"])
    command = np.concatenate([chat.tokenizer.encode("cat "), letters])
    record = said(chat, command)
    stream = retokenise(record, chat)
    assert stream is not None and len(stream.ids) < len(record.ids)
    assert chat.decode(stream.ids) == chat.decode(record.ids)
    known = stream.source >= 0
    assert np.array_equal(stream.ids[known], record.ids[stream.source[known]])
    assert np.all(np.diff(stream.source[known]) > 0)
    positions = stream.counterparts(len(record))
    lost = np.flatnonzero(positions < 0)
    assert lost.size and np.all(record.origin[lost] == Origin.SAMPLED)
    assert np.array_equal(stream.source[positions[positions >= 0]], np.flatnonzero(positions >= 0))


def test_streams_reach_the_scoring_processes(chat, tmp_path):
    stream = Retokenised(np.array([3, 1], np.int32), np.array([0, -1]))
    baseline = Alternative(BASELINE, "", "as trained", Setting(True, "float32", "model", "float32", 1.0, "export", 0))
    Job([], baseline, [], Kept(frozenset(), frozenset())).write(tmp_path, {"f" * 64: stream})
    read = Job.retokenised(tmp_path)["f" * 64]
    assert np.array_equal(read.ids, stream.ids) and np.array_equal(read.source, stream.source)


def test_the_worst_tokens_come_with_their_text_and_what_explains_them(chat):
    record = said(chat, chat.tokenizer.encode("cat notes.md"))
    setting = Setting(True, "float32", "model", "float32", 1.0, "export", 0)
    named = {
        BASELINE: Alternative(BASELINE, "", "as trained", setting),
        "own_routes": Alternative("own_routes", "routing", "its own", replace(setting, replay=False)),
    }
    count = int(record.loss_mask.sum())
    trained = np.full(count, -1.0, np.float32)
    trained[1], trained[2] = -3.0, -1.5
    native = trained.copy()
    native[1], native[2] = -1.1, np.nan
    scored = Scored([record], [{BASELINE: trained, "own_routes": native}], named, {})
    worst = worst_tokens(scored, BASELINE, chat.decode, 2)
    first = int(np.flatnonzero(record.loss_mask)[0])
    assert [token["token"] for token in worst] == [first + 1, first + 2]
    assert worst[0]["explained_by"] == "own_routes" and worst[1]["explained_by"] == ""
    assert worst[0]["difference"] == -2.0 and worst[0]["text"] == chat.decode(record.ids[first + 1 : first + 2])
    assert worst[0]["before"].endswith(chat.decode(record.ids[first : first + 1]))
    assert [token["token"] for token in worst_tokens(scored, "own_routes", chat.decode, 9)][:1] == [first + 1]
    assert len(worst_tokens(scored, "own_routes", chat.decode, 99)) == count - 1

"""Demonstrations: reproducible, resumable, whole."""

from dataclasses import asdict

import pytest

from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error
from megatron_t1.model.initial import create_initial_model
from megatron_t1.rollout.demonstrate import run_demonstrate, tokenizer_corpus
from megatron_t1.rollout.formats import load_format
from megatron_t1.trajectory.record import Origin
from megatron_t1.trajectory.store import RolloutStore
from tests.rollout.conftest import PassingSandbox


@pytest.fixture
def config(tiny_model):
    config = Config()
    config.model.path = str(tiny_model)
    config.env.sandbox._target_ = "tests.rollout.conftest.PassingSandbox"
    config.generate.demonstrations, config.generate.pool = 30, "small"
    config.generate.train = config.generate.held_out = 4
    config.rollout.max_tokens_per_turn = 200
    return config


def test_same_seed_same_records_and_a_finished_folder_stays(config, tmp_path):
    first = run_demonstrate(config, tmp_path / "a")
    assert first == run_demonstrate(config, tmp_path / "b")
    digests = [[record.digest for record in RolloutStore(tmp_path / name)] for name in "ab"]
    assert digests[0] == digests[1] and len(digests[0]) == 30
    assert not list((tmp_path / "a").glob("demonstration-*"))  # sealed
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert run_demonstrate(config, tmp_path / "a") == first
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    for record in RolloutStore(tmp_path / "a"):
        assert set(record.ids[record.loss_mask]) and not (record.origin == Origin.SAMPLED).any()
        assert record.header.verdict is None
    config.run.seed = 1
    with pytest.raises(T1Error, match="another seed"):
        run_demonstrate(config, tmp_path / "a")


def test_a_stopped_run_is_continued(config, tmp_path, monkeypatch):
    whole = run_demonstrate(config, tmp_path / "whole")

    class Broken(PassingSandbox):
        starts = 0

        async def start(self, task):
            Broken.starts += 1
            if Broken.starts == 20:
                raise T1Error("broken")

    monkeypatch.setattr("megatron_t1.rollout.demonstrate.WRITE_EVERY", 8)
    monkeypatch.setattr("tests.rollout.conftest.PassingSandbox", Broken)
    config.generate.workers = 1
    with pytest.raises(T1Error, match="broken"):
        run_demonstrate(config, tmp_path / "parts")
    assert len(RolloutStore(tmp_path / "parts")) == 16
    config.generate.workers = 16
    continued = run_demonstrate(config, tmp_path / "parts")
    assert Broken.starts == 20 + 14
    assert continued == whole


def test_a_demonstration_that_is_cut_is_an_error(config, tmp_path):
    config.rollout.max_tokens_per_turn = 4
    with pytest.raises(T1Error, match="token_limit after 0 of") as caught:
        run_demonstrate(config, tmp_path / "cut")
    assert "rollout.max_tokens_per_turn" in caught.value.remedy


def test_words_of_the_tasks_become_single_tokens(config, tmp_path):
    from megatron_t1.environment.generate.pools import POOLS

    corpus = list(tokenizer_corpus(config.generate, 0, 400))
    chat = load_format("chatml_bash", create_initial_model(tmp_path / "m", config.model, 0, corpus))
    pool = asdict(POOLS["small"])
    words = {word for values in pool.values() if isinstance(values, tuple) for word in values if word.isalpha()}
    used = {word for word in words if sum(f" {word}" in text for text in corpus) >= 2}
    assert len(used) > 30
    assert [word for word in sorted(used) if len(chat.tokenizer.encode(f" {word}")) != 1] == []

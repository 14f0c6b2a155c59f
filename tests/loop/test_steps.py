from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.config.schema import LoopConfig
from megatron_t1.loop.steps import all_steps, next_step, predecessors, readers


def walk(loop):
    return [(step.iteration, "+".join(step.phases)) for step in all_steps(loop)]


def test_table_of_steps():
    assert walk(LoopConfig(warmup_iterations=1, iterations=2)) == [
        (0, "evaluation+rollout"), (0, "critic"),
        (1, "rollout"), (1, "critic"), (1, "actor"), (1, "export"),
        (2, "rollout"), (2, "critic"), (2, "actor"), (2, "export"),
        (3, "evaluation"),
    ]  # fmt: skip


def test_colocated_roles_share_a_launch():
    assert walk(LoopConfig(warmup_iterations=1, iterations=1, colocate_roles=True)) == [
        (0, "evaluation+rollout"), (0, "critic"),
        (1, "rollout"), (1, "critic+actor+export"),
        (2, "evaluation"),
    ]  # fmt: skip


def test_warmup_alone_never_touches_the_actor():
    steps = walk(LoopConfig(warmup_iterations=3, iterations=0, evaluate_first=False))
    assert steps == [(0, "rollout"), (0, "critic"), (1, "rollout"), (1, "critic"), (2, "rollout"), (2, "critic")]


def test_evaluation_every_second_policy_and_none_at_the_ends():
    loop = LoopConfig(warmup_iterations=2, iterations=5, evaluate_every=2, evaluate_first=False, evaluate_last=False)
    assert [step.iteration for step in all_steps(loop) if "evaluation" in step.phases] == [4, 6]  # policies 2 and 4


def test_what_a_step_reads():
    loop = LoopConfig(warmup_iterations=2, iterations=3)
    assert predecessors(loop, (0, "rollout")) == []
    assert predecessors(loop, (2, "rollout")) == []  # the first iteration with an actor update samples policy 0
    assert predecessors(loop, (3, "rollout")) == [(2, "export")]
    assert predecessors(loop, (3, "actor")) == [(3, "rollout"), (3, "critic"), (2, "actor")]
    assert predecessors(loop, (2, "actor")) == [(2, "rollout"), (2, "critic")]
    assert predecessors(loop, (1, "critic")) == [(1, "rollout"), (0, "critic")]


def test_readers_are_found_beyond_a_lowered_number_of_iterations():
    finished = {(2, "critic"), (2, "actor"), (3, "critic"), (4, "critic")}
    assert readers(LoopConfig(warmup_iterations=2, iterations=3), (2, "critic"), finished) == [
        (2, "actor"),
        (3, "critic"),
    ]
    assert readers(LoopConfig(warmup_iterations=2, iterations=1), (3, "critic"), finished) == [(4, "critic")]


loops = st.builds(
    LoopConfig,
    warmup_iterations=st.integers(0, 3),
    iterations=st.integers(0, 4),
    colocate_roles=st.booleans(),
    evaluate_every=st.integers(0, 3),
    evaluate_first=st.booleans(),
    evaluate_last=st.booleans(),
)


@given(loops)
def test_every_step_comes_once_and_after_what_it_reads(loop):
    finished = []
    while (step := next_step(loop, finished)) is not None:
        for key in step.keys:
            assert key not in finished
            assert set(predecessors(loop, key)) <= {*finished, *step.keys[: step.keys.index(key)]}
            finished.append(key)
    assert finished == [key for step in all_steps(loop) for key in step.keys]
    policies = [iteration for iteration, phase in finished if phase == "evaluation"]
    assert len(policies) == len(set(policies))


@given(loops, st.data())
def test_a_partly_finished_launch_is_reduced_to_the_rest(loop, data):
    steps = list(all_steps(loop))
    if not steps:
        return
    step = data.draw(st.sampled_from(steps))
    done = data.draw(st.integers(0, len(step.phases) - 1))
    before = [key for other in steps[: steps.index(step)] for key in other.keys]
    found = next_step(loop, [*before, *step.keys[:done]])
    assert found.phases == step.phases[done:]


def test_a_longer_training_continues_a_shorter_one():
    short = LoopConfig(warmup_iterations=1, iterations=1)
    finished = [key for step in all_steps(short) for key in step.keys]
    step = next_step(LoopConfig(warmup_iterations=1, iterations=2), finished)
    assert (step.iteration, step.phases) == (2, ("rollout",))

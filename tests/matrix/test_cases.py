from __future__ import annotations

from itertools import combinations

from tests.matrix.cases import FACTORS, REPORTED, all_cases, problem, selection


def test_a_selection_covers_every_pair_that_can_occur():
    def pairs(cases):
        return {
            (first, getattr(case, first), second, getattr(case, second))
            for case in cases
            for first, second in combinations(FACTORS, 2)
        }

    chosen = selection(2)
    assert pairs(chosen) == pairs(all_cases())
    assert len(chosen) < 40 and set(REPORTED) <= set(chosen)
    assert len({case.name for case in chosen}) == len(chosen)


def test_every_value_of_every_factor_is_tried():
    for name, values in FACTORS.items():
        assert {getattr(case, name) for case in selection(1)} == set(values), name


def test_what_cannot_run_is_left_out_with_a_reason():
    from dataclasses import replace

    case = REPORTED[0]
    assert not any(map(problem, REPORTED))
    assert "rounds" in problem(replace(case, micro_batches=1))
    assert "expert_tensor=1" in problem(replace(case, expert_tensor=2))
    assert "differs" in problem(replace(case, model="mtp"))
    assert "value model" in problem(replace(case, model="mtp", roles="value"))

import argparse
from urllib.request import urlopen

import measure
import pytest
from measure import Figure


def options(*, check=False, as_json=False):
    return argparse.Namespace(check=check, json=as_json)


@pytest.mark.parametrize(
    ("ours", "bar", "more_is_better", "verdict"),
    [
        (150.0, 1.5, True, "≥ 1.5 met by 0 %"),
        (300.0, 1.5, True, "≥ 1.5 met by 100 %"),
        (120.0, 1.5, True, "≥ 1.5 NOT MET by 20 %"),
        (40.0, 0.5, False, "≤ 0.5 met by 20 %"),
        (75.0, 0.5, False, "≤ 0.5 NOT MET by 50 %"),
    ],
)
def test_a_verdict_says_by_how_much_a_bar_is_met_or_not(ours, bar, more_is_better, verdict):
    figure = Figure("x", ours, 100.0, "µs", bar, more_is_better=more_is_better)
    assert figure.verdict == verdict
    assert figure.holds is ("NOT" not in verdict)


def test_a_figure_without_a_bar_is_only_shown():
    figure = Figure("x", 1.0, 100.0, "µs", None)
    assert (figure.verdict, figure.holds) == ("none", True)


def test_a_program_ends_with_1_only_where_a_bar_is_missed_and_check_is_given(capsys):
    good = Figure("good", 2.0, 1.0, "MB/s", 1.5)
    bad = Figure("bad", 1.0, 1.0, "MB/s", 1.5)
    measure.report([good, bad], options())
    measure.report([good], options(check=True))
    with pytest.raises(SystemExit, match=r"^not met: bad$"):
        measure.report([good, bad], options(check=True))
    assert "NOT MET by 33 %" in capsys.readouterr().out


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 51), (99, 100), (100, 100)])
def test_percentiles_need_no_order(percent, value):
    assert measure.percentile(list(range(100, 0, -1)), percent) == value


def test_runs_take_turns_and_the_first_round_is_not_counted():
    order = []
    taken = {"a": iter([9.0, 1.0, 3.0, 2.0]), "b": iter([9.0, 4.0, 4.0, 5.0])}

    def run(name):
        order.append(name)
        return next(taken[name])

    found = measure.in_turn(3, a=lambda: run("a"), b=lambda: run("b"))
    assert found == {"a": 2.0, "b": 4.0}
    assert "".join(order) == "abababab"


def test_percentiles_of_rounds_are_medians():
    rounds = iter([[9.0], [1.0, 2.0], [5.0, 7.0], [3.0, 4.0]])
    found = measure.percentiles_in_turn(3, (0, 99), a=lambda: next(rounds))
    assert found == {"a": {0: 3.0, 99: 4.0}}


def test_a_profile_of_a_cluster_names_what_ran_in_it():
    with measure.cluster() as running:
        spent = running.profile(lambda: urlopen(f"{running.address}/debug/metrics").close())
    assert any(each.file.endswith("server/http.py") for each in spent)
    assert [each.seconds for each in spent] == sorted(
        (each.seconds for each in spent), reverse=True
    )

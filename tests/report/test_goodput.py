"""Where a run's seconds go: each to one activity, over all lives, and what a restart did again is not counted twice."""

from __future__ import annotations

import json

import pytest

from shardwright.report.goodput import Clock, Life, goodput, lives_as_json, log_entries, read_lives, where_time_went


def test_each_second_is_charged_to_one_activity_and_compiling_is_taken_out_of_where_it_happens():
    moments, compiled = iter([0, 10, 14, 20, 21, 26]), iter([0, 0, 3, 3, 3, 3])
    clock = Clock(lambda: next(compiled), lambda: next(moments))
    clock.began(5)
    clock.turn_to("steps")  # 10 s of start
    with clock.on("evaluation"):  # 4 s of steps, 3 of them compiling
        pass  # 6 s
    with clock.on("data"):  # 1 s of steps
        pass  # 5 s
    assert clock._charged == {"start": 15, "steps": 2, "compile": 3, "data": 5, "evaluation": 6, "save": 0}


def life(first: int, last: int, **seconds: float) -> Life:
    return Life(0, sum(seconds.values()), first, last, seconds)


def test_steps_that_a_later_life_did_again_are_no_goodput():
    killed = life(0, 100, start=10, steps=200, save=5)  # its last checkpoint: 60
    spent = where_time_went([killed, life(60, 100, start=8, steps=80, data=2)])
    assert spent["steps"] == 120 + 80
    assert spent["again"] == 80
    assert (spent["start"], spent["restart"], spent["data"], spent["save"]) == (10, 8, 2, 5)
    assert goodput(spent) == pytest.approx(200 / 305)


def test_a_life_whose_steps_were_all_done_again_has_none_that_count_and_one_without_steps_is_no_error():
    spent = where_time_went([life(0, 10, steps=10), life(10, 20, steps=10), life(5, 5, start=1), life(5, 20, steps=15)])
    assert (spent["steps"], spent["again"]) == (5 + 15, 5 + 10)
    assert goodput(where_time_went([])) is None


def test_lives_come_back_from_their_file_and_anything_else_is_refused():
    lives = [life(0, 4, start=1.5, steps=2)]
    assert read_lives(lives_as_json(lives)) == lives
    good = json.loads(lives_as_json(lives))[0]
    bad = [b"", b"{}x", b"[1]", b"null", b'["a"]', b"[" * 100_000]
    bad += [json.dumps([{**good, **wrong}]).encode() for wrong in ({"last": 1e300}, {"began": "x"}, {"more": 1})]
    bad += [json.dumps([{**good, "seconds": wrong}]).encode() for wrong in (3, {"steps": float("nan")}, {"save": -1})]
    for data in bad:
        with pytest.raises(ValueError):  # noqa: PT011  # of many texts
            read_lives(data)


def test_the_time_between_lives_counts_where_the_run_itself_went_on_and_is_nobodys_elsewhere():
    killed, resumed = life(0, 10, steps=10), Life(100, 110, 10, 20, {"steps": 10})
    assert where_time_went([killed, resumed])["between"] == 0
    restarted = Life(130, 140, 15, 20, {"start": 1, "steps": 5}, after="write /mnt/x: OSError")
    spent = where_time_went([killed, resumed, restarted])
    assert (spent["between"], spent["again"], spent["restart"]) == (20, 5, 1)
    logs = log_entries([killed, resumed, restarted])
    assert logs["restarts"] == 1
    assert logs["seconds/between"] == 20
    assert logs["goodput"] == goodput(spent)
    assert "seconds/save" not in logs
    assert read_lives(lives_as_json([restarted])) == [restarted]
    assert "restarts" not in log_entries([killed, resumed])

"""The load of experts in numbers, in log entries and as a picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shardwright.report.expert_load import ExpertLoad, as_record, labelled, log_entries
from shardwright.report.pictures import load_picture

EVEN = ExpertLoad("model.layers.3.mlp.experts", (0.25, 0.25, 0.25, 0.25))
ONE = ExpertLoad("model.layers.12.mlp.experts", (0.0, 1.0, 0.0, 0.0), dropped=0.5)


def test_an_even_load_is_once_the_mean_with_entropy_one_and_all_on_one_expert_e_times_with_entropy_zero():
    assert (max(EVEN.over_mean), EVEN.entropy) == (1, pytest.approx(1))
    assert (max(ONE.over_mean), ONE.entropy) == (4, 0)


def test_entries_name_each_layer_and_sum_up_all():
    assert log_entries([EVEN, ONE]) == {
        "expert_load_max": 4,
        "expert_load_entropy": pytest.approx(0.5),
        "expert_load_max/layer_3": 1,
        "expert_load_entropy/layer_3": pytest.approx(1),
        "expert_load_max/layer_12": 4,
        "expert_load_entropy/layer_12": 0,
        "dropped_fraction/layer_12": 0.5,
    }
    assert log_entries([]) == {}


def test_two_modules_of_one_layer_go_by_their_names():
    two = [ExpertLoad(f"model.layers.0.{name}.experts", (0.5, 0.5)) for name in ("mlp", "other")]
    assert list(labelled(two)) == ["model.layers.0.mlp.experts", "model.layers.0.other.experts"]


@pytest.mark.parametrize("layers", [1, 40])
def test_the_picture_has_a_cell_for_each_expert_also_with_other_numbers_of_them_and_a_line_for_each_layer(layers):
    loads = [ExpertLoad(f"h.{i}.moe", (0.5, *[0.5 / (3 + i % 2)] * (3 + i % 2))) for i in range(layers)]
    history = [{"step": step, **log_entries(loads)} for step in (5, 10)]
    picture = ElementTree.fromstring(load_picture(loads, history))
    paths = [path.get("d", "") for path in picture.iter("{http://www.w3.org/2000/svg}path")]
    assert sum(path.count("M") for path in paths) == sum(len(load.shares) for load in loads)
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == layers


def test_the_file_has_each_layers_shares():
    assert as_record([ONE], step=7) == {
        "step": 7,
        "layers": {"model.layers.12.mlp.experts": {"shares": (0.0, 1.0, 0.0, 0.0), "dropped": 0.5}},
    }

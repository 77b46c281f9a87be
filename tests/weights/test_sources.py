"""A model made from its config alone begins as transformers' own does, in every family."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shardwright.errors import UserError
from shardwright.model.meta_model import meta_model
from shardwright.models.tiny import families, tiny_config
from shardwright.weights.weight_sources import seeded_init


def learned_and_saved(model):
    """Names of parameters and saved buffers; of what is tied, the first."""
    saved = model.state_dict().keys()
    return [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers() if n in saved]


def spread(values):
    values = values.double()
    return values.mean().item(), values.std(unbiased=False).item()


@pytest.mark.parametrize("family", families())
def test_each_parameter_and_buffer_begins_as_transformers_makes_it(family):
    """Constants are equal; of random values mean and spread are, within six standard errors."""
    model = meta_model(tiny_config(family))
    source = seeded_init(model, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        own = type(model)._from_config(model.config, dtype=torch.float32).state_dict()
    for name in learned_and_saved(model):
        ours, theirs = source(name), own[name]
        assert (ours.shape, ours.isfinite().all()) == (theirs.shape, True), name
        (mean, deviation), (their_mean, their_deviation) = spread(ours), spread(theirs)
        if 0.0 in (deviation, their_deviation) and ours.numel() > 1:
            assert torch.equal(ours, theirs.to(ours.dtype)), name
        error = 6 * max(deviation, their_deviation) / math.sqrt(ours.numel())
        # the mean of two samples, and their spread: a uniform's and a normal's, cut or not, vary less than this
        assert mean == pytest.approx(their_mean, abs=1.5 * error + 1e-6 * abs(their_mean)), name
        assert deviation == pytest.approx(their_deviation, abs=1.2 * error), name


class Untouched(nn.Module):
    """A module of a family that neither its constructor nor the family's init gives a value."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.full((3,), math.nan))


def test_what_nobody_gives_a_value_is_refused_and_not_what_lies_in_memory(monkeypatch):
    family = "llama"
    mlp = type(meta_model(tiny_config(family)).model.layers[0].mlp)
    constructor = mlp.__init__

    def with_slope(self, config):
        constructor(self, config)
        self.untouched = Untouched()

    monkeypatch.setattr(mlp, "__init__", with_slope)
    source = seeded_init(meta_model(tiny_config(family)), 0)
    assert source("model.layers.0.mlp.up_proj.weight").isfinite().all()
    with pytest.raises(UserError, match=r"model.layers.0.mlp.untouched.slope, to which transformers gives no value"):
        source("model.layers.0.mlp.untouched.slope")


def test_a_value_of_a_constructor_depends_on_the_seed_alone_and_leaves_the_generator_alone():
    """openai-gpt's own layers draw their values in the constructor, and its init leaves them."""
    model, name = meta_model(tiny_config("openai-gpt")), "transformer.h.1.attn.c_attn.weight"
    before = torch.random.get_rng_state()
    one, two, other = (seeded_init(model, seed) for seed in (1, 1, 2))
    assert torch.equal(one(name), two(name))
    assert not torch.equal(one(name), other(name))
    assert not torch.equal(one(name), one(name.replace(".1.", ".2.")))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(parameter.is_meta for parameter in model.parameters())

"""Random decoders: what their layers are and are given is drawn, to compare how they run with plain torch.

`python -m tests.support.random_layers --cases 200` tries many.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from typing import Any

import torch
import torch_xla
from torch import nn

from shardwright.layout.stacking import layer_names
from shardwright.models.layers.decoder_layers import DecoderLayers, stack_layers, wrap_layers
from shardwright.prove.trajectory import relative

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 8, 8, 16

# what a layer may be given or have, besides its weights
FEATURES = (
    "mask",  # a bool tensor
    "numbers",  # integers beyond what float32 holds
    "rotation",  # complex numbers
    "scale",  # a float that differs between layers
    "bias",  # a saved buffer
    "table",  # a buffer of integers that differs between layers
    "index",  # the layer's own number, which it reads
    "part",  # its own part of a tensor that is learned
    "shared",  # a tensor that is learned, the same for all
    "nested",  # a dictionary of tensors
    "residual",  # a second tensor that goes from layer to layer
    "extra",  # a second output that nobody uses, of a shape of its own
    "unused",  # a weight that takes no part
)


class Layer(nn.Module):
    """A layer with the ``features`` of its kind."""

    def __init__(self, index: int, kind: frozenset[str], draw: random.Random) -> None:
        super().__init__()
        self.kind, self.layer_idx = kind, index
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        if "scale" in kind:
            self.scale = draw.uniform(0.5, 2)
        if "bias" in kind:
            self.register_buffer("bias", torch.tensor([draw.uniform(-1, 1) for _ in range(WIDTH)]))
        if "table" in kind:
            table = torch.tensor([draw.randrange(WIDTH) for _ in range(WIDTH)])
            self.register_buffer("table", table, persistent=False)
        if "unused" in kind:
            self.spare = nn.Linear(WIDTH, 2)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, mask: Any, *, given: dict[str, Any], part: Any = None
    ) -> Any:
        y = torch.tanh(self.first(x))
        if "scale" in self.kind:
            y = y * self.scale
        if "bias" in self.kind:
            y = y + self.bias
        if "table" in self.kind:
            y = y[..., self.table]
        if "index" in self.kind:
            y = y / (self.layer_idx + 1)
        if mask is not None:
            y = torch.where(mask.unsqueeze(-1), y, -y)
        if "numbers" in given:
            y = y * (1 + given["numbers"] % 1009).to(y.dtype).unsqueeze(-1) / 1009
        if "rotation" in given:
            y = torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * given["rotation"]).flatten(-2)
        if "nested" in given:
            y = y + given["nested"]["deep"][0]
        if "shared" in given:
            y = y * given["shared"]
        if part is not None:
            y = y + part
        if residual is not None:
            residual = residual + y
            y = residual.sin()
        x = x + self.second(y)
        outputs = (x, residual) if "residual" in self.kind else (x,)
        outputs = (*outputs, y.transpose(-2, -1) * 2) if "extra" in self.kind else outputs
        return outputs if len(outputs) > 1 else x


class Decoder(nn.Module):
    """A decoder whose layers are drawn: a prefix, a period that repeats, and a suffix."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        everywhere = frozenset(f for f in ("residual",) if draw.random() < 0.3)
        self.between = draw.random() < 0.05  # the decoder does something between layers

        def kind() -> frozenset[str]:
            drawn = {f for f in FEATURES if draw.random() < (0.03 if f == "index" else 0.2)}
            return everywhere | (drawn - {"residual"})

        period = [kind() for _ in range(draw.choice([1, 1, 2, 3]))]
        kinds = [kind() for _ in range(draw.choice([0, 0, 1, 2]))] + period * draw.choice([2, 2, 3])
        kinds += [kind() for _ in range(draw.choice([0, 0, 1]))]
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Layer(index, kind, draw) for index, kind in enumerate(kinds))
        self.shared, self.parts = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(len(kinds), 1, 1, WIDTH))
        self.numbers = [draw.randrange(2**25, 2**40) for _ in range(64)]

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        x = self.embed(input_ids)
        ids = input_ids % 2
        mask, device = ids.bool(), x.device
        rows, length = input_ids.shape
        angles = torch.arange(length * WIDTH // 2, device=device).reshape(length, -1).to(x.dtype)
        constants = {
            "numbers": torch.tensor(self.numbers[:length], device=device).expand(rows, length),
            "rotation": torch.polar(torch.ones_like(angles), angles),
            "shared": self.shared * 2,
            "nested": {"deep": (angles[:, :1].cos(), None)},
        }
        residual = None
        for index, layer in enumerate(self.blocks):
            if "residual" in layer.kind and residual is None:
                residual = x * 0.5
            given = {name: value for name, value in constants.items() if name in layer.kind}
            part = self.parts[index] if "part" in layer.kind else None
            output = layer(x, residual, mask if "mask" in layer.kind else None, given=given, part=part)
            x = output[0] if isinstance(output, tuple) else output
            residual = output[1] if "residual" in layer.kind else residual
            if self.between:
                x = x * 1.5
        return x if residual is None else x + residual


def compare(seed: int, *, scan: bool, remat: str | float) -> tuple[float, str, list[str]]:
    """How far the gradients of a drawn decoder lie from plain torch's.

    Returns:
        the largest relative difference of the output or a gradient; of what; the names of the layer list's children.
    """
    # torch's autograd counts devices at the first backward, so there must be one by then
    device = torch.device("xla")
    torch.ones(1, device=device).cpu()
    plain = Decoder(seed)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    weight = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed + 1))
    output = plain(ids)
    (output * weight).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()} | {"the output": output.detach()}

    values = dict(plain.named_parameters()) | dict(plain.named_buffers())
    model = copy.deepcopy(plain)
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(parameter.detach().to("meta")))
    stack_layers(model) if scan else wrap_layers(model)
    for name, parameter in list(model.named_parameters()):
        stack = [values[n].detach() for n in layer_names(name, len(parameter))]
        whole = torch.stack(stack) if layer_names(name, len(parameter)) != [name] else stack[0]
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(whole.to(device)))
    for name, buffer in list(model.named_buffers()):
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = buffer.to(device)
    layers = model.blocks
    assert isinstance(layers, DecoderLayers)
    layers.configure(lambda parameters: parameters, remat)
    result = model(ids.to(device))
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad((result * weight.to(device)).sum(), list(parameters.values()), allow_unused=True)
    torch_xla.sync()
    ours: dict[str, torch.Tensor | None] = {"the output": result.detach().cpu()}
    for (name, parameter), gradient in zip(parameters.items(), found, strict=True):
        names = layer_names(name, len(parameter))
        parts = (
            [None] * len(names)
            if gradient is None
            else gradient.cpu().unbind()
            if names != [name]
            else [gradient.cpu()]
        )
        ours |= dict(zip(names, parts, strict=True))
    worst, where = max((relative(ours[name], expected[name], 1e-6), name) for name in expected)
    return worst, where, [name for name, _ in layers.named_children()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the gradients of random decoders with plain torch's.")
    parser.add_argument("--cases", type=int, default=50, help="how many decoders (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (default: %(default)s)")
    options = parser.parse_args()
    worst, scanned = 0.0, 0
    for seed in range(options.seed, options.seed + options.cases):
        for scan, remat in ((True, "full"), (True, "none"), (False, "full")):
            difference, where, children = compare(seed, scan=scan, remat=remat)
            worst, scanned = max(worst, difference), scanned + (scan and any(":" in c or c == "*" for c in children))
            if difference > 1e-5:
                sys.exit(
                    f"seed {seed}, scan={scan}, remat={remat}, layers {children}: {where} differs by {difference:.1e}"
                )
    print(f"{options.cases} decoders × 3 ways, {scanned} of them scanned: worst difference {worst:.1e}")


if __name__ == "__main__":
    main()

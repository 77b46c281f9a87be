"""Makes the captured step: a small mixture-of-experts training step in JAX, lowered for 2 × 4 chips.

    python tests/compile/captured/make_step.py            # writes step.hlo.pb.gz and step.json beside this file

The step has an embedding, three scanned and rematerialised layers (an attention-like matmul, and an expert MLP with an
exchange of tokens), a tied head, and momentum. libtpu 0.0.21 compiled it for v5p:2x2x2 to `optimised.hlo.gz` and
`buffers.txt.gz`. Of the `--large` step, which does not fit, it left `optimised_large.hlo.gz` and `out_of_memory.txt`:
only at that size does it make windowed einsums and fused reduce-scatters. `over_time.txt.gz` is the last part of what
`shardwright.compile.hlo.buffers.peak_buffers` makes of the small step's buffer assignment.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.compile.lowered_graph import Argument, LoweredGraph

LARGE = "--large" in sys.argv
# layers, hidden, intermediate, experts, vocabulary, batch, sequence
L, H, F, E, V, B, S = (3, 1024, 2048, 4, 8192, 16384, 1024) if LARGE else (3, 256, 512, 4, 1024, 16, 128)
BATCH = ("fsdp", "expert")
WEIGHTS = {
    "model.embed_tokens.weight": ((V, H), P(BATCH, None)),
    "model.layers.*.self_attn.q_proj.weight": ((L, H, H), P(None, BATCH, None)),
    "model.layers.*.mlp.experts.up_proj": ((L, E, H, F), P(None, "expert", "fsdp", None)),
    "model.layers.*.mlp.experts.down_proj": ((L, E, F, H), P(None, "expert", None, "fsdp")),
}
jax.config.update("jax_use_shardy_partitioner", False)
mesh = jax.make_mesh((2, 4), ("fsdp", "expert"))


def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def layer(x_BSH, weights):
    query, up, down = (w.astype(jnp.bfloat16) for w in weights)
    with jax.named_scope("model.layers.*.self_attn"):
        x_BSH = x_BSH + constrain(jnp.tanh(x_BSH @ query), BATCH, None, None)
    with jax.named_scope("model.layers.*.mlp.experts"):
        sent = constrain(x_BSH.reshape(B, E, S // E, H).transpose(1, 0, 2, 3), "expert", "fsdp", None, None)
        hidden = jax.nn.silu(jnp.einsum("ebsh,ehf->ebsf", sent, up))
        done = constrain(jnp.einsum("ebsf,efh->ebsh", hidden, down), "expert", "fsdp", None, None)
        x_BSH = x_BSH + constrain(done.transpose(1, 0, 2, 3).reshape(B, S, H), BATCH, None, None)
    return x_BSH, None


def loss(weights, ids_BS):
    embedding, *stacked = weights
    with jax.named_scope("model.embed_tokens"):
        x_BSH = constrain(embedding.astype(jnp.bfloat16)[ids_BS], BATCH, None, None)
    x_BSH, _ = jax.lax.scan(jax.checkpoint(layer), x_BSH, tuple(stacked))
    with jax.named_scope("lm_head"):
        logits = constrain(x_BSH @ embedding.astype(jnp.bfloat16).T, BATCH, None, None).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids_BS[:, 1:, None], -1)
        return -jnp.mean(picked)


def step(*arguments):
    weights, moments, ids_BS = arguments[: len(WEIGHTS)], arguments[len(WEIGHTS) : -1], arguments[-1]
    value, gradients = jax.value_and_grad(loss)(weights, ids_BS)
    with jax.named_scope("optimizer"):
        moments = [0.9 * m + g for m, g in zip(moments, gradients, strict=True)]
        weights = [w - 1e-3 * m for w, m in zip(weights, moments, strict=True)]
    return value, *weights, *moments


shapes = [shape for shape, _ in WEIGHTS.values()]
specs = [tuple(spec) for _, spec in WEIGHTS.values()]
structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes] * 2 + [jax.ShapeDtypeStruct((B, S), jnp.int32)]
hlo = jax.jit(step).lower(*structs).compiler_ir("hlo").as_serialized_hlo_module_proto()
arguments = [
    Argument(name + suffix, kind, shape, "float32", spec, first + number)
    for suffix, kind, first in (("", "weights", 1), (" first moment", "optimizer", 1 + len(WEIGHTS)))
    for number, (name, shape, spec) in enumerate(zip(WEIGHTS, shapes, specs, strict=True))
]
arguments.append(Argument("input_ids", "batch", (B, S), "int32", (BATCH, None), None))
lowered = LoweredGraph(hlo, tuple(arguments), ((), *specs, *specs), dict(mesh.shape), L)
here, name = Path(__file__).parent, "step_large" if LARGE else "step"
(here / f"{name}.hlo.pb.gz").write_bytes(gzip.compress(hlo, mtime=0))
rest = {key: value for key, value in asdict(lowered).items() if key != "hlo"}
(here / f"{name}.json").write_text(json.dumps(rest, indent=1))

"""Layout: from a recipe, the table that a person writes, to a plan of every parameter.

A recipe is loaded, resolved against a model's shapes and a mesh, and checked until nothing in it can fail later.
All of it is pure: it needs no device, reads no weights and allocates nothing.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.layout.load import load_recipe
    from trainer.layout.partition import PartitionSpec, partition_spec
    from trainer.layout.plan import ParameterPlan, ShardingPlan, make_plan

__all__ = ["ParameterPlan", "PartitionSpec", "ShardingPlan", "load_recipe", "make_plan", "partition_spec"]
__getattr__, __dir__ = lazy_names(
    __name__,
    ParameterPlan="plan",
    PartitionSpec="partition",
    ShardingPlan="plan",
    load_recipe="load",
    make_plan="plan",
    partition_spec="partition",
)

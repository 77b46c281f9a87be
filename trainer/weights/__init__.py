"""A model's weights on their way in and out, one parameter at a time.

They come from a hub checkpoint, a seeded init, a run's checkpoint or a state dict, and go onto the mesh or to files in
the hub's format. The host never holds the whole model.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.weights.hub_read import HubWeights
    from trainer.weights.hub_write import export
    from trainer.weights.live import LiveWeights
    from trainer.weights.place import place_parameters
    from trainer.weights.sources import Source, seeded_init, state_dict_weights

__all__ = ["HubWeights", "LiveWeights", "Source", "export", "place_parameters", "seeded_init", "state_dict_weights"]
__getattr__, __dir__ = lazy_names(
    __name__,
    HubWeights="hub_read",
    LiveWeights="live",
    Source="sources",
    export="hub_write",
    place_parameters="place",
    seeded_init="sources",
    state_dict_weights="sources",
)

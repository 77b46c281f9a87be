"""What a run is told: one dataclass of options, gathered from those of each room."""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.arguments.training import TrainingArguments

__all__ = ["TrainingArguments"]
__getattr__, __dir__ = lazy_names(__name__, TrainingArguments="training")

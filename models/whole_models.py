"""Whole multimodal models that stumble over text alone."""

from transformers.modeling_outputs import MoeCausalLMOutputWithPast


def bear_text_alone() -> None:
    """Give what a text part with experts returns the ``image_outputs`` that a whole model asks it for: None.

    semi-private: transformers/models/llama4/modeling_llama4.py, transformers 5.24.0, which ends in an AttributeError.
    """
    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]

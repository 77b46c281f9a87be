"""What the TPU's compiler says of a step: memory, time, attribution, as text, page and JSON."""

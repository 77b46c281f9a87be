"""Data: from text to the batches of a step.

Documents are tokenised and packed into rows, stored or streamed; rows are shuffled and batched. A cursor says which row
comes next, so that no row is seen twice or missed after a stop. All of it is pure CPU.
"""

"""Data: from text to the batches of a step.

Documents are tokenised and packed into rows, stored or streamed; rows are shuffled and batched. A cursor names the next
row, so that none is seen twice or missed after a stop. All of it is pure CPU.
"""

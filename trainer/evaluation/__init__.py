"""A model on its mesh, measured by lm-evaluation-harness's tasks, with no export: `scripts/evaluate.py`, and `LM`.

The harness (lm_eval 0.4.13) is imported when `LM` is first asked for: `pip install shardwright[eval]`.
"""

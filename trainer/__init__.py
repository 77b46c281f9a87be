"""Shardwright: train Hugging Face models across TPU pods from a sharding recipe that a person can read."""

"""Tests of shardwright.prove."""

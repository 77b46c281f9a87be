"""Starts `scripts/train.py` on the hosts of TPU slices: xpk, JobSet, SkyPilot, queued TPU VMs, Ray.

Each target is a pure function from a request to a plan of files and commands; planning opens no device and asks no
cloud.
"""

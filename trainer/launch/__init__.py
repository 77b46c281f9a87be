"""Starting `scripts/train.py` on the hosts of TPU slices: xpk, JobSet, SkyPilot, queued TPU VMs, Ray.

A request becomes a plan (files and commands) by pure functions, one a target; nothing here opens a device or asks a
cloud. `scripts/launch.py` shows the plan, writes it and, where told to, runs it.
"""

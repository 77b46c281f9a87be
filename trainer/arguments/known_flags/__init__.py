"""The table of other trainers' arguments: the option that is the same here, or why there is none."""

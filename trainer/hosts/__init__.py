"""The processes of a job: hosts that agree, and what watches and restarts them."""

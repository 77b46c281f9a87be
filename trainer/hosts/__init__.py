"""The processes of a job: how hosts agree, and how they are watched and restarted."""

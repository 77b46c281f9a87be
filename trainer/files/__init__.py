"""Files: folders on a disk or in an object store, locks, caches."""

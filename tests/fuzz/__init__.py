"""Files that are wrong in every way: see `tests.checks.fuzz`."""

"""Files that are wrong in every way: see `tests.check_fuzz`."""

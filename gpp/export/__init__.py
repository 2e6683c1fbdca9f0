"""Plans for the engines of others: a file an engine, found by `conf/export/` (`gpp.export.base` has what each promises)."""

"""What a stage may do beyond plain passes: one folder each, found by `gpp.mechanism`."""
